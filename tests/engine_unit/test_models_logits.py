"""Logits of every supported architecture against transformers in float32, on tiny random checkpoints.

Covers a prompt in one step, in chunks and token by token. Also covers a batch with scattered blocks, in which some
sequences decode and others prefill. Does not cover real weights (see tests/engine_real) or types other than float32.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rayloom_engine.models.model import RankModel
from rt_tiny import (
    VARIANTS,
    VOCAB_SIZE,
    WIDE_NORMS,
    TinySequence,
    advance,
    load_tiny,
    logits_of,
    make_cache,
    tiny_variant,
    transformers_model,
)

TOLERANCE = 1e-4
NUM_TOKENS = 27  # seven blocks of 4, of which the last is not full; longer than every sliding window


@pytest.fixture(scope="module", params=[*VARIANTS, *WIDE_NORMS])
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, RankModel]:
    """The model of transformers and ours."""
    folder = tiny_variant(tmp_path_factory.mktemp(str(request.param)), str(request.param))
    return transformers_model(folder), load_tiny(folder)


def tokens(seed: int, count: int = NUM_TOKENS) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.1, "the reference must not be flat, or nothing is compared"
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_a_prompt_computed_in_any_cut_has_the_logits_of_transformers(variant: tuple[Any, RankModel]) -> None:
    reference, model = variant
    token_ids = tokens(1)
    expected = logits_of(reference, token_ids)
    for cut in ([NUM_TOKENS], [5, 9, 1, 12], [1] * NUM_TOKENS, [20, *[1] * 7]):
        cache = make_cache(model.shape)
        sequence = TinySequence(token_ids, block_table=[9, 2, 17, 3, 40, 11, 5])
        logits = torch.cat([advance(model, cache, [(sequence, count)])[0] for count in cut])
        assert_close(logits, expected)


def test_sequences_in_one_batch_do_not_disturb_each_other(variant: tuple[Any, RankModel]) -> None:
    reference, model = variant
    decoding = TinySequence(tokens(2), block_table=[7, 1, 30, 31, 4, 12, 50])
    late = TinySequence(tokens(3, 6), block_table=[2, 63])
    chunked = TinySequence(tokens(4), block_table=[8, 6, 33, 10, 15, 13, 60])
    fresh = TinySequence(tokens(5, 11), block_table=[20, 19, 18])
    cache = make_cache(model.shape)
    parts: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in (decoding, late, chunked, fresh)}

    def step(*steps: tuple[TinySequence, int]) -> None:
        for (sequence, _), logits in zip(steps, advance(model, cache, steps), strict=True):
            parts[id(sequence)].append(logits)

    step((decoding, 22), (late, 2))
    step((decoding, 1), (late, 1), (chunked, 13))
    step((decoding, 1), (late, 1), (chunked, 9), (fresh, 11))
    step((late, 1), (decoding, 1), (chunked, 1))
    step((chunked, 4), (decoding, 1), (late, 1))
    step((decoding, 1))
    for sequence in (decoding, late, chunked, fresh):
        assert_close(torch.cat(parts[id(sequence)]), logits_of(reference, sequence.token_ids))


def test_a_copied_block_continues_like_the_original(variant: tuple[Any, RankModel]) -> None:
    reference, model = variant
    prompt, ending = tokens(6, 10), tokens(7, 5)
    cache = make_cache(model.shape)
    original = TinySequence(prompt + ending, block_table=[1, 2, 3, 4])
    advance(model, cache, [(original, 10)])
    cache.copy_blocks(((3, 9),))
    other_ending = [(token_id + 1) % VOCAB_SIZE for token_id in ending]
    copy = TinySequence(prompt + other_ending, block_table=[1, 2, 9, 5], num_computed=10)
    ours, theirs = advance(model, cache, [(original, 5), (copy, 5)])
    assert_close(ours, logits_of(reference, prompt + ending)[10:])
    assert_close(theirs, logits_of(reference, prompt + other_ending)[10:])
