"""The GPUs and drivers on which kernels start early. The driver is a C library with one function, compiled here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")  # optional: the engine needs it only on GPUs

from rayloom_engine.kernels.triton import early_start

CUDA = torch.device("cuda", 0)


def driver(folder: Path, version: int) -> str:
    source, library = folder / "driver.c", folder / "driver.so"
    source.write_text(f"int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}")
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


@pytest.mark.parametrize(
    ("capability", "version", "starts_early"),
    [((9, 0), 13000, True), ((12, 0), 12030, True), ((9, 0), 12020, False), ((8, 9), 13000, False)],
)
def test_kernels_start_early_from_hopper_and_cuda_12_3_on(
    capability: tuple[int, int], version: int, starts_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(early_start, "_DRIVER", driver(tmp_path, version))
    assert early_start.starts_early.__wrapped__(CUDA) is starts_early


def test_kernels_start_late_if_the_driver_does_not_tell_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(early_start, "_DRIVER", str(tmp_path / "none.so"))
    assert not early_start.starts_early.__wrapped__(CUDA)


def test_a_launch_on_a_cpu_has_no_argument_that_triton_does_not_know() -> None:
    assert early_start.early_start(torch.device("cpu")) == {"STARTS_EARLY": False}
