"""The decoder on the C library with several ranks: stages give the same bits as one rank, shards similar numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.models.on_library.decoder import LibraryDecoder
from rt_library import ISAS
from rt_stages import (
    FOR_PROMPTS_ALONE,
    UNTIL_PREEMPTED,
    RankProcesses,
    StagesInARow,
    answers,
    ids_by_request,
    load_stages,
    make_engine,
    stage_config,
)
from rt_tiny import VARIANTS, tiny_checkpoint

# The vocabulary cannot be divided evenly between ranks, or into the library's blocks of 16. The feed-forward can.
SIZES = {"vocab_size": 251, "intermediate_size": 128, "num_hidden_layers": 4}

# (type, tensor, pipeline). The first variant is also tested with stages alone and with shards alone, because the
# tolerance for shards may hide a fault of stages.
LAYOUTS = [("float32", 4, 1), ("float32", 2, 2), ("bfloat16", 2, 2)]
ALL_LAYOUTS = [*LAYOUTS, ("float32", 1, 2), ("float32", 2, 1), ("bfloat16", 1, 2), ("bfloat16", 4, 1)]

_epochs = itertools.count(1)


def checkpoint(folder: Path, variant: str) -> Path:
    architecture, overrides = VARIANTS[variant]
    return tiny_checkpoint(folder, architecture, **{**overrides, **SIZES})


def logprobs_of(outputs: dict[str, list[SequenceOutput]]) -> list[float]:
    parts = outputs["logprobs"]
    prompt = [entry.logprob for part in parts for entry in part.prompt_logprobs]
    assert len(prompt) == 29
    return prompt


def of_one_rank(folder: Path, dtype: str) -> dict[str, list[SequenceOutput]]:
    ranks = load_stages(stage_config(folder, dtype=dtype))
    assert isinstance(ranks[0].loaded.model, LibraryDecoder)
    engine = make_engine(StagesInARow(ranks))
    outputs = answers(engine, SIZES["vocab_size"], UNTIL_PREEMPTED)
    assert engine.scheduler.counters.num_preemptions > 0
    return outputs


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["qwen2-some-windows", "gemma3"])
def test_stages_give_the_same_bits_as_one_rank(
    variant: str, dtype: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLOOM_CPU_ISA", isa)
    folder = checkpoint(tmp_path, variant)
    expected = of_one_rank(folder, dtype)
    stages = load_stages(stage_config(folder, 3, dtype=dtype))
    got = answers(make_engine(StagesInARow(stages), depth=3), SIZES["vocab_size"], UNTIL_PREEMPTED)
    assert ids_by_request(got) == ids_by_request(expected)
    assert logprobs_of(got) == logprobs_of(expected)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("first"))
    processes = RankProcesses(stage_config(folder, 2, tensor_parallel_size=2))
    yield processes
    processes.close()


@pytest.mark.skipif(not ISAS, reason="there is no C library")
@pytest.mark.parametrize(
    ("variant", "layouts"),
    [("llama-tied", ALL_LAYOUTS)]
    + [(name, LAYOUTS) for name in ("llama-biases", "mistral-window", "qwen3-biases", "phi3", "gemma2", "qwen2-moe")],
)
def test_ranks_in_processes_compute_the_answers_of_one_rank(
    variant: str, layouts: list[tuple[str, int, int]], ranks: RankProcesses, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, variant)
    of_one = {dtype: of_one_rank(folder, dtype) for dtype in ("float32", "bfloat16")}
    for dtype, tensor, pipeline in layouts:
        expected = of_one[dtype]
        ranks.load(stage_config(folder, pipeline, tensor_parallel_size=tensor, dtype=dtype))
        epoch = next(_epochs)
        ranks.join(epoch)
        has_equal_tokens = tensor == 1 or dtype == "float32"
        max_tokens = UNTIL_PREEMPTED if has_equal_tokens else FOR_PROMPTS_ALONE
        got = answers(make_engine(ranks, epoch, depth=pipeline), SIZES["vocab_size"], max_tokens)
        if tensor == 1:
            assert logprobs_of(got) == logprobs_of(expected)
        if has_equal_tokens:
            assert ids_by_request(got) == ids_by_request(expected), (tensor, pipeline, dtype)
        # The partial sums of shards are added in float32, and may differ in their last bit. In bfloat16, such sums may
        # round differently.
        tolerance = 1e-4 if dtype == "float32" else 0.1
        assert logprobs_of(got) == pytest.approx(logprobs_of(expected), abs=tolerance)
