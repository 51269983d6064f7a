"""The choice of a rank between the C library and torch: settings, shapes, a missing library, types and threads."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rayloom_engine.cpu_library import finding
from rayloom_engine.cpu_library.arrays import ELEMENTS
from rayloom_engine.errors import ConfigError
from rayloom_engine.models.decoder import CausalLM
from rayloom_engine.models.on_library.decoder import LibraryDecoder
from rayloom_engine.models.on_library.support import unsupported
from rayloom_engine.models.shape import ModelShape, read_shape
from rayloom_engine.worker.loaded_rank import LoadedRank
from rt_library import ISAS, library_functions
from rt_stages import load_stages, stage_config
from rt_tiny import tiny_checkpoint, tiny_variant

LOGGER = "rayloom_engine.worker.part_loading"
LOST = "torch computes this model, which is slower, and an answer may depend on the other requests of a step: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp("model"), "llama")


def load(folder: Path, caplog: pytest.LogCaptureFixture, **settings: Any) -> tuple[LoadedRank, list[str]]:
    """A rank, and the lines of its log about its kernels."""
    with caplog.at_level(logging.INFO, LOGGER):
        (rank,) = load_stages(stage_config(folder, **settings))
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    return rank, [line for line in lines if line.startswith(("kernels", "torch"))]


@pytest.mark.parametrize("isa", ISAS)
def test_the_setting_chooses_the_instruction_set_and_the_log_names_it(
    isa: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAYLOOM_CPU_ISA", isa)
    rank, lines = load(folder, caplog, threads=3)
    assert isinstance(rank.loaded.model, LibraryDecoder)
    assert lines == [f"kernels: C library on cpu, float32, {isa}, 3 threads, not pinned"]


@pytest.mark.skipif(not ISAS, reason="there is no C library")
def test_the_best_instruction_set_is_the_default_and_threads_are_pinned_if_they_have_all_cpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAYLOOM_CPU_ISA", raising=False)
    num_cpus = len(os.sched_getaffinity(0))
    _, lines = load(folder, caplog, threads=num_cpus)
    threads = "1 thread" if num_cpus == 1 else f"{num_cpus} threads"
    assert lines == [f"kernels: C library on cpu, float32, {ISAS[0]}, {threads}, pinned"]


@pytest.mark.parametrize(("variable", "value"), [("RAYLOOM_CPU_ISA", "torch"), ("RAYLOOM_KERNELS", "plain")])
def test_torch_computes_on_request_without_a_warning(
    variable: str, value: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, value)
    rank, lines = load(folder, caplog)
    assert isinstance(rank.loaded.model, CausalLM)
    assert len(lines) == 1 and lines[0].startswith("kernels: plain torch on cpu, float32")
    # What decides which of torch's kernels compute is in the fingerprint.
    assert rank.arithmetic == f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


@pytest.mark.skipif(not ISAS, reason="there is no C library")
def test_an_unknown_instruction_set_is_refused_with_those_of_this_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLOOM_CPU_ISA", "sse")
    with pytest.raises(ConfigError) as refusal:
        load_stages(stage_config(folder))
    assert str(refusal.value) == (
        "RAYLOOM_CPU_ISA: 'sse' is not an instruction set that the CPU library has and this CPU can run; "
        f"use one of {', '.join((*ISAS, 'torch'))}"
    )


def test_without_a_library_one_line_says_what_is_lost_and_why(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finding, "PACKAGE", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("RAYLOOM_CPU_ISA", raising=False)
    rank, lines = load(folder, caplog)
    assert isinstance(rank.loaded.model, CausalLM)
    reason = "the package has no compiled library, and there is no C++ compiler here"
    assert lines[0] == f"{LOST}the CPU library is not used, because {reason}"
    assert len(lines) == 2 and lines[1].startswith("kernels: plain torch")

    monkeypatch.setenv("RAYLOOM_CPU_ISA", "avx2")
    with pytest.raises(ConfigError) as refusal:
        load_stages(stage_config(folder))
    assert (
        str(refusal.value) == f"RAYLOOM_CPU_ISA: 'avx2' needs the CPU library, and there is none: {reason}; use torch"
    )


@pytest.mark.skipif(not ISAS, reason="there is no C library")
def test_a_model_that_the_library_cannot_compute_is_served_by_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank, lines = load(tiny_checkpoint(tmp_path, intermediate_size=97), caplog)
    assert isinstance(rank.loaded.model, CausalLM)
    reason = "intermediate_size of a rank is 97, no multiple of 16"
    assert lines[0] == f"{LOST}the CPU library is not used, because {reason}"


@pytest.mark.parametrize(
    ("changes", "num_shards", "dtype", "reason"),
    [
        ({}, 1, "float32", ""),
        ({}, 2, "bfloat16", ""),
        ({}, 1, "float16", "it has no kernels for float16"),
        ({"head_dim": 24}, 1, "float32", "head_dim is 24, no multiple of 16"),
        ({"head_dim": 272}, 1, "float32", "head_dim is 272, more than 256"),
        ({"hidden_size": 72}, 1, "float32", "hidden_size is 72, no multiple of 16"),
        ({}, 4, "float32", "intermediate_size of a rank is 24, no multiple of 16"),
        ({"num_heads": 48, "num_kv_heads": 1}, 1, "float32", ""),
        ({"num_heads": 49, "num_kv_heads": 1}, 1, "float32", "a key/value head has 49 query heads, more than 48"),
    ],
)
def test_shapes_and_types_that_the_library_has_no_kernels_for(
    changes: dict[str, int], num_shards: int, dtype: str, reason: str, folder: Path
) -> None:
    shape: ModelShape = dataclasses.replace(read_shape(folder), **changes)
    assert unsupported(shape, num_shards, dtype) == reason


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_weights_stay_bfloat16_on_every_cpu(
    isa: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAYLOOM_CPU_ISA", isa)
    rank, _ = load(folder, caplog, dtype="bfloat16")
    assert (rank.dtype, rank.compute_dtype) == ("bfloat16", {"avx512": "bfloat16", "avx2": "float32"}[isa])
    assert rank.weight_bytes == read_shape(folder).weight_bytes(2)
    pages = rank._allocate(rank.loaded, 3)._cache.pages
    assert {each.dtype for each in pages} == {ELEMENTS["bfloat16"]}
    functions = library_functions()
    assert functions is not None
    assert rank.arithmetic == f"C library {functions.build}, {isa}"
    assert rank.hidden_dtype == "float32", "stages send the residual stream"


@pytest.mark.skipif(not ISAS, reason="there is no C library")
def test_the_activity_of_a_rank_grows_with_the_halves_of_its_layers(folder: Path) -> None:
    (rank,) = load_stages(stage_config(folder))
    model = rank.loaded.model
    assert isinstance(model, LibraryDecoder)
    rank.runner(3, 1, None)
    before = rank.activity.advance
    model._progress.value += 3  # as the library does while it computes
    assert rank.activity.advance == before + 3
    rank.runner(3, 2, None)
    assert rank.activity.advance == 0
