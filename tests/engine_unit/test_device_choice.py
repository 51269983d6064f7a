"""The choice of the device: the engine queries CUDA through torch only where a GPU may exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloom_engine.errors import ConfigError
from rayloom_engine.worker.device import choose_device, choose_weight_type


def never() -> bool:
    raise AssertionError("torch was asked")


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_torch_is_not_asked_on_a_machine_without_a_gpu(device: str, tmp_path: Path) -> None:
    (tmp_path / "null").touch()
    assert choose_device(device, never, tmp_path) == "cpu"


def test_a_gpu_is_not_looked_for_if_the_setting_is_cpu(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert choose_device("cpu", never, tmp_path) == "cpu"


@pytest.mark.parametrize("file", ["nvidia0", "nvidiactl", "dxg", "kfd"])
@pytest.mark.parametrize(("has_cuda", "chosen"), [(True, "cuda"), (False, "cpu")])
def test_torch_decides_where_a_gpu_may_be(has_cuda: bool, chosen: str, file: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    assert choose_device("auto", lambda: has_cuda, tmp_path) == chosen


def test_cuda_on_request_is_asked_of_torch_and_refused_without_a_device(tmp_path: Path) -> None:
    assert choose_device("cuda", lambda: True, tmp_path) == "cuda"
    with pytest.raises(ConfigError) as refusal:
        choose_device("cuda", lambda: False, tmp_path)
    assert str(refusal.value) == "device: 'cuda', but no CUDA device is visible; use 'cpu' or 'auto'"


def test_the_type_of_the_weights_is_the_checkpoints_unless_it_is_given() -> None:
    assert choose_weight_type("auto", "float16") == "float16"
    assert choose_weight_type("float32", "float64") == "float32"
    with pytest.raises(ConfigError, match="dtype: auto means 'float64' for this checkpoint; choose one of bfloat16"):
        choose_weight_type("auto", "float64")
