"""Attention sinks in the C library, with every instruction set.

A sink is one more score in the softmax of a query head, without a value. The logits are compared with those of
transformers and torch. They are also compared bit for bit between contexts that are divided into segments, chunks and
threads in different ways: they differ if the library adds a sink twice, or not at all.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rayloom_engine.models.on_library.decoder import BLOCK_SIZE
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import whole_model
from rt_library import ISAS, LibraryModel, library_cache, open_library
from rt_sinks import NUM_LAYERS, Heads, SinkModel, sink_model
from rt_thread_group import ThreadGroup, on_ranks
from rt_tiny import VOCAB_SIZE, TinySequence, advance, logits_of, make_batch, make_cache

# Three segments of attention (256 positions each). The last one has one block that is not full.
NUM_TOKENS = 520
TOKEN_IDS = random.Random(5).choices(range(VOCAB_SIZE), k=NUM_TOKENS)
BLOCKS = range(-(-NUM_TOKENS // BLOCK_SIZE))
# Shapes of heads. The second has a group of 48 rows, so a token's tile is as large as a tile can be.
HEADS = (
    Heads(query=6, key_value=2, dim=16, window=300),
    Heads(query=48, key_value=1, dim=16, window=5),
    Heads(query=2, key_value=2, dim=80, window=256),
)

pytestmark = pytest.mark.skipif(not ISAS, reason="there is no C library")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[SinkModel, torch.Tensor]:
    """The model, and the logits [T, V] of transformers."""
    ours, theirs = sink_model(tmp_path_factory.mktemp("sinks"))
    return ours, logits_of(theirs, TOKEN_IDS)


def logits(model: LibraryModel, cuts: tuple[int, ...] = (NUM_TOKENS,)) -> torch.Tensor:
    """The logits [T, V] of the tokens that are computed in these pieces."""
    sequence = TinySequence(TOKEN_IDS, BLOCKS[::-1])
    cache = library_cache(model, len(BLOCKS))
    return torch.cat([advance(model, cache, [(sequence, count)])[0] for count in cuts])


def on_plain_torch(model: SinkModel, weights: torch.dtype = torch.float32) -> torch.Tensor:
    """The logits [T, V] of plain torch in float32, with weights that are rounded to this type."""
    blocks = range(-(-NUM_TOKENS // 4))
    cache = make_cache(model.shape, num_blocks=len(blocks))
    return advance(model.on_torch(weights), cache, [(TinySequence(TOKEN_IDS, blocks), NUM_TOKENS)])[0]


@pytest.mark.parametrize("isa", ISAS)
def test_float32_logits_are_those_of_transformers(models: tuple[SinkModel, torch.Tensor], isa: str) -> None:
    ours, expected = models
    torch.testing.assert_close(logits(ours.on_library(isa)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_logits_are_nearly_those_of_float32_with_the_same_weights(
    models: tuple[SinkModel, torch.Tensor], isa: str
) -> None:
    ours, _ = models
    expected = on_plain_torch(ours, torch.bfloat16)
    found = logits(ours.on_library(isa, torch.bfloat16))
    # Root mean square of the difference, in units of the logits' standard deviation, as in test_cpu_decoder.py.
    assert 0.0 < float((found - expected).square().mean().sqrt() / expected.std()) < 0.03


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_groups_of_heads_windows_and_caps_give_the_logits_of_torch(
    heads: Heads, cap: float | None, isa: str, tmp_path: Path
) -> None:
    model, _ = sink_model(tmp_path, heads)
    model = model if cap is None else model.with_cap(cap)
    torch.testing.assert_close(logits(model.on_library(isa)), on_plain_torch(model), atol=2e-4, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_threads_and_other_sequences_do_not_change_a_bit(
    models: tuple[SinkModel, torch.Tensor], dtype: torch.dtype, isa: str
) -> None:
    model = models[0].on_library(isa, dtype, num_threads=1)
    expected = logits(model)
    for num_threads, cuts in ((4, (NUM_TOKENS,)), (1, (255, 2, 257, *[1] * 6)), (4, (100, 412, *[1] * 8))):
        open_library(isa, num_threads)
        assert torch.equal(logits(model, cuts), expected), (num_threads, cuts)
    # A prefix of two segments that another sequence has computed, then tokens beside those of a third sequence.
    cache = library_cache(model, 2 * len(BLOCKS))
    first = TinySequence(TOKEN_IDS, BLOCKS)
    advance(model, cache, [(first, 512)])
    own = range(len(BLOCKS), len(BLOCKS) + 2)
    second = TinySequence(TOKEN_IDS, [*BLOCKS[:32], own[0]], num_computed=512)
    third = TinySequence(TOKEN_IDS[7:], [own[1]])
    _, after_prefix = advance(model, cache, [(third, 9), (second, 8)])
    assert torch.equal(after_prefix, expected[512:])


@pytest.mark.parametrize("isa", ISAS)
def test_a_step_that_needs_only_its_last_rows_computes_them_alike(
    models: tuple[SinkModel, torch.Tensor], isa: str
) -> None:
    model = models[0].on_library(isa)
    expected = logits(model)
    batch = make_batch([NUM_TOKENS], [NUM_TOKENS], [BLOCKS], BLOCK_SIZE)
    inputs = (torch.tensor(TOKEN_IDS), torch.arange(NUM_TOKENS), batch, library_cache(model, len(BLOCKS)))
    rows = [300, NUM_TOKENS - 1]
    hidden_TD = model.forward(*inputs, group=None, wanted_rows=rows)  # type: ignore[arg-type]
    assert torch.equal(model.logits(hidden_TD[rows]), expected[rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_of_minus_infinity_changes_nothing(
    models: tuple[SinkModel, torch.Tensor], dtype: torch.dtype, isa: str, tmp_path: Path
) -> None:
    ours, _ = models
    none = ours.without_sinks(tmp_path / "none").on_library(isa, dtype)
    lowest = ours.with_weights(tmp_path / "lowest", "sinks", -torch.inf).on_library(isa, dtype)
    expected = logits(none)
    assert torch.equal(logits(lowest), expected)
    assert not torch.equal(logits(ours.on_library(isa, dtype)), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_a_sink_far_above_all_scores_takes_the_whole_softmax(
    models: tuple[SinkModel, torch.Tensor], isa: str, tmp_path: Path
) -> None:
    # exp(-900) is 0, so the heads' outputs are 0, as if their projection were 0.
    ours, _ = models
    highest = ours.with_weights(tmp_path / "highest", "sinks", 1000.0).on_library(isa)
    nothing = ours.with_weights(tmp_path / "nothing", "o_proj.weight", 0.0).on_library(isa)
    assert torch.equal(logits(highest), logits(nothing))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 4])  # with one thread, no tile is cut into segments
@pytest.mark.parametrize("position", [100, 256])
def test_a_key_that_is_not_finite_reaches_the_logits_in_spite_of_a_high_sink(
    models: tuple[SinkModel, torch.Tensor], position: int, num_threads: int, isa: str, tmp_path: Path
) -> None:
    # A score of the first layer is infinite, so the weights of its segment have a NaN. The token at position 256 is the
    # first of its segment.
    model = models[0]
    embedding_VD = model.weights["model.embed_tokens.weight"]
    embedding_VD[:, 0] = 0.0
    embedding_VD[9, 0] = 1.0
    first_layer = "model.layers.0.self_attn"
    key = model.weights[f"{first_layer}.k_proj.weight"]
    key[:, 0] = 3e38
    damaged = {
        "model.embed_tokens.weight": embedding_VD,
        f"{first_layer}.k_proj.weight": key,
        f"{first_layer}.sinks": torch.full((4,), 1000.0),
    }
    broken = model.with_tensors(tmp_path, damaged).on_library(isa, num_threads=num_threads)
    token_ids = [9 if place == position else place % 8 for place in range(300)]
    cache = library_cache(broken, 19)
    (found,) = advance(broken, cache, [(TinySequence(token_ids, range(19)), 300)])
    is_nan = found.isnan().any(dim=1)
    assert is_nan[position:].all()
    assert not is_nan[: position // BLOCK_SIZE * BLOCK_SIZE].any()  # the NaN may reach earlier tokens of its block


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_in_a_sink_reaches_the_logits(models: tuple[SinkModel, torch.Tensor], isa: str, tmp_path: Path) -> None:
    broken = models[0].with_weights(tmp_path, "layers.1.self_attn.sinks", torch.nan).on_library(isa)
    (found,) = advance(broken, library_cache(broken, 1), [(TinySequence(TOKEN_IDS, [0]), 4)])
    assert found.isnan().all()


@pytest.mark.parametrize("isa", ISAS)
def test_two_ranks_have_the_logits_of_one(models: tuple[SinkModel, torch.Tensor], isa: str) -> None:
    ours, expected = models
    ranks = [ours.on_library(isa, part=ModelPart(whole_model(NUM_LAYERS), Shard(index, 2))) for index in range(2)]
    batch = make_batch([NUM_TOKENS], [NUM_TOKENS], [BLOCKS], BLOCK_SIZE)

    def part_of(rank: LibraryModel, group: Any) -> torch.Tensor:
        inputs = (torch.tensor(TOKEN_IDS), torch.arange(NUM_TOKENS), batch, library_cache(rank, len(BLOCKS)))
        return rank.logits(rank.forward(*inputs, group))

    def computing(rank: LibraryModel) -> Any:
        def compute(group: ThreadGroup) -> torch.Tensor:
            return part_of(rank, group)

        return compute

    parts = on_ranks([computing(rank) for rank in ranks])
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_the_bytes_of_the_weights_include_the_sinks(
    models: tuple[SinkModel, torch.Tensor], isa: str, tmp_path: Path
) -> None:
    ours, _ = models
    for dtype in (torch.float32, torch.bfloat16):
        found = ours.on_library(isa, dtype).weight_bytes
        assert found == dtype.itemsize * ours.shape.num_parameters
