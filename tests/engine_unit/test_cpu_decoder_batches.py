"""On the C library a token's logits do not depend on its batch.

The logits are equal bit for bit in all of these cases: the token is computed alone, in a batch, in chunks, after a
prefix hit, and with any number of threads.
"""

from __future__ import annotations

import random
import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayloom_engine.kv.library_pages import LibraryPages
from rayloom_engine.models.on_library.decoder import BLOCK_SIZE
from rt_library import ISAS, LibraryModel, library_cache, load_on_library, open_library
from rt_tiny import VOCAB_SIZE, TinySequence, advance, tiny_checkpoint, tiny_variant

# More than one segment of attention (256 positions), and not a multiple of a block.
NUM_TOKENS = 283
NUM_OTHERS = 4
OTHER_TOKENS = 70
BLOCKS = -(-NUM_TOKENS // BLOCK_SIZE)
OTHER_BLOCKS = -(-OTHER_TOKENS // BLOCK_SIZE)
VARIANTS = ("llama-biases", "mistral-window", "qwen3-biases", "qwen2-moe")


@dataclass(frozen=True)
class Case:
    model: LibraryModel
    expected_TV: torch.Tensor  # logits of the sequence alone, computed in one step


def token_ids_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def new_cache(model: LibraryModel) -> LibraryPages:
    return library_cache(model, BLOCKS * 2 + NUM_OTHERS * OTHER_BLOCKS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {variant: tiny_variant(tmp_path_factory.mktemp(variant), variant) for variant in VARIANTS}


@pytest.fixture(
    scope="module",
    params=[
        (isa, dtype, quantization)
        for isa in ISAS
        for dtype in (torch.float32, torch.bfloat16)
        for quantization in ("none", "int8")
    ],
    ids=str,
)
def cases(request: pytest.FixtureRequest, folders: dict[str, Path]) -> list[Case]:
    isa, dtype, quantization = request.param
    made = []
    for folder in folders.values():
        model = load_on_library(folder, isa, dtype, quantization=quantization)
        sequence = TinySequence(token_ids_of(0, NUM_TOKENS), range(BLOCKS))
        (expected_TV,) = advance(model, new_cache(model), [(sequence, NUM_TOKENS)])
        made.append(Case(model, expected_TV))
    return made


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_logits_depend_neither_on_chunks_nor_on_the_batch(cases: list[Case], data: st.DataObject) -> None:
    case = cases[data.draw(st.integers(0, len(cases) - 1), label="variant")]
    open_library(ISAS[0], data.draw(st.integers(1, 4), label="threads"))
    rng = random.Random(data.draw(st.integers(0, 2**32), label="blocks"))
    cache = new_cache(case.model)
    blocks = rng.sample(range(cache.num_blocks), cache.num_blocks)
    sequence = TinySequence(token_ids_of(0, NUM_TOKENS), blocks[:BLOCKS])
    others = [
        TinySequence(token_ids_of(1 + index, OTHER_TOKENS), blocks[2 * BLOCKS + index * OTHER_BLOCKS :][:OTHER_BLOCKS])
        for index in range(NUM_OTHERS)
    ]
    parts = []
    while sequence.num_computed < NUM_TOKENS:
        left = NUM_TOKENS - sequence.num_computed
        count = data.draw(st.one_of(st.integers(1, min(left, 5)), st.integers(1, left)), label="chunk")
        steps = [(sequence, count)]
        for other in others:
            most = OTHER_TOKENS - other.num_computed
            if most and (others_count := data.draw(st.integers(0, most), label="other")):
                steps.append((other, others_count))
        rng.shuffle(steps)
        logits = advance(case.model, cache, steps)
        parts.append(next(rows for (each, _), rows in zip(steps, logits, strict=True) if each is sequence))
    assert torch.equal(torch.cat(parts), case.expected_TV)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_prefix_that_another_sequence_has_computed_gives_the_same_logits(
    cases: list[Case], data: st.DataObject
) -> None:
    case = cases[data.draw(st.integers(0, len(cases) - 1), label="variant")]
    num_shared = data.draw(st.integers(1, BLOCKS - 1), label="shared blocks")
    cache = new_cache(case.model)
    token_ids = token_ids_of(0, NUM_TOKENS)
    shared_tokens = num_shared * BLOCK_SIZE
    first = TinySequence(token_ids[:shared_tokens] + token_ids_of(9, 5), range(num_shared + 1))
    length = len(first.token_ids)
    cut = data.draw(st.integers(1, length - 1), label="cut")
    for count in (cut, length - cut):
        advance(case.model, cache, [(first, count)])
    own_blocks = range(BLOCKS, 2 * BLOCKS - num_shared)
    second = TinySequence(token_ids, [*range(num_shared), *own_blocks], num_computed=shared_tokens)
    (logits,) = advance(case.model, cache, [(second, NUM_TOKENS - shared_tokens)])
    assert torch.equal(logits, case.expected_TV[shared_tokens:])


def test_a_replay_from_the_ids_continues_bit_for_bit(cases: list[Case]) -> None:
    token_ids = token_ids_of(0, NUM_TOKENS)
    for case in cases:
        decoded = TinySequence(token_ids, range(BLOCKS))
        cache = new_cache(case.model)
        advance(case.model, cache, [(decoded, 40)])
        rows = [advance(case.model, cache, [(decoded, 1)])[0] for _ in range(40, 100)]
        replayed = TinySequence(token_ids, range(BLOCKS, 2 * BLOCKS))
        (again,) = advance(case.model, cache, [(replayed, 100)])
        assert torch.equal(torch.cat(rows), again[40:])


@pytest.mark.skipif(not ISAS, reason="there is no C library")
def test_a_chunk_with_a_long_context_takes_little_memory_on_many_threads(tmp_path: Path) -> None:
    # 252 tokens have 24 query heads of 64 elements in 300 segments. Separate results for each segment would need 460
    # MB. A window of 1 makes the test fast, because the blocks before the window are not read.
    folder = tiny_checkpoint(
        tmp_path,
        "MistralForCausalLM",
        sliding_window=1,
        num_hidden_layers=1,
        num_attention_heads=24,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=131_072,
    )
    model = load_on_library(folder, ISAS[0], torch.float32)
    num_blocks = 76_800 // BLOCK_SIZE
    sequence = TinySequence([7] * 76_800, [0] * num_blocks, num_computed=76_800 - 252)
    cache = library_cache(model, 1)
    advance(model, cache, [(TinySequence([1], [0]), 1)])
    model._rotary.rows(np.zeros(1, dtype=np.int64), 76_800)
    open_library(ISAS[0], 32)
    before = _address_space()
    advance(model, cache, [(sequence, 252)])
    assert _address_space() - before < 200 << 20


def _address_space() -> int:
    """The number of mapped bytes.

    A buffer that the library has mapped or allocated counts until the library's next step.
    """
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
