"""Tensor-parallel ranks in processes connected by gloo generate the tokens of a single rank, for each architecture.

Together the variants have all features that need special cuts: biases, norms of heads, a tied head, windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rt_embeds import EmbeddingRows
from rt_stages import (
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

# There are 2 key/value heads, so with 4 ranks each head is on two ranks. Neither the vocabulary nor the feed-forward
# size is divisible by 4.
ODD_SIZES = {"vocab_size": 255, "intermediate_size": 97}
# (tensor, pipeline). (2, 1) is left out, because (2, 2) cuts every matrix in the same way. test_lost_peers.py tests two
# shards without stages.
FOUR_SHARDS = (4, 1)
STAGES_OF_SHARDS = (2, 2)
WITHOUT_WINDOWS = ("llama-tied", "llama-biases", "qwen3-biases", "mixtral")
WITH_WINDOWS = ("mistral-window", "qwen2-some-windows")

_epochs = itertools.count(1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("first"))
    processes = RankProcesses(stage_config(folder, 2, tensor_parallel_size=2))
    yield processes
    processes.close()


@pytest.mark.parametrize(
    ("variant", "layouts"),
    [(variant, (FOUR_SHARDS, STAGES_OF_SHARDS)) for variant in WITHOUT_WINDOWS]
    + [(variant, (STAGES_OF_SHARDS,)) for variant in WITH_WINDOWS]
    # A window changes neither the matrices nor their cut. The cases above cut other variants into four shards, and
    # these variants into two.
    + [pytest.param(variant, (FOUR_SHARDS,), marks=pytest.mark.slow) for variant in WITH_WINDOWS],
)
def test_shards_compute_the_tokens_of_one_rank(
    variant: str, layouts: tuple[tuple[int, int], ...], ranks: RankProcesses, tmp_path: Path
) -> None:
    architecture, overrides = VARIANTS[variant]
    folder = tiny_checkpoint(tmp_path, architecture, **{**ODD_SIZES, **overrides})
    vocab_size = ODD_SIZES["vocab_size"]
    expected = answers(make_engine(StagesInARow(load_stages(stage_config(folder)))), vocab_size, UNTIL_PREEMPTED)
    for tensor, pipeline in layouts:
        ranks.load(stage_config(folder, pipeline, tensor_parallel_size=tensor))
        epoch = next(_epochs)
        ranks.join(epoch)
        embedding = EmbeddingRows(folder) if pipeline == 2 else None  # of the greedy prompts
        engine = make_engine(ranks, epoch, depth=pipeline)
        got = answers(engine, vocab_size, UNTIL_PREEMPTED, embedding)
        assert engine.scheduler.counters.num_preemptions > 0
        assert ids_by_request(got) == ids_by_request(expected), (tensor, pipeline)
        values, right = (
            [entry.logprob for part in outputs["logprobs"] for entry in part.prompt_logprobs]
            for outputs in (got, expected)
        )
        assert len(values) == 29 and values == pytest.approx(right, abs=1e-4)


def test_the_built_in_model_on_three_ranks(ranks: RankProcesses) -> None:
    config = stage_config("builtin://smollm2-135m")
    expected = ids_by_request(answers(make_engine(StagesInARow(load_stages(config))), 49152, max_tokens=8))
    ranks.load(config.model_copy(update={"tensor_parallel_size": 3}))
    epoch = next(_epochs)
    ranks.join(epoch)
    assert ids_by_request(answers(make_engine(ranks, epoch), 49152, max_tokens=8)) == expected
