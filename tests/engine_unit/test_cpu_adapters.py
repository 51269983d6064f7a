"""LoRA adapters on the C library: results equal PEFT's in float32 and do not depend on the batch.

A token's logits do not depend on the other tokens of its step or on the adapters of these tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayloom_engine.config import Quantization
from rayloom_engine.core.adapter import Adapter, AdapterLoad
from rayloom_engine.errors import ModelError
from rayloom_engine.kv.library_pages import LibraryPages
from rayloom_engine.kv.paged_batch import PagedBatch
from rayloom_engine.models.adapters.peft_folder import adapter_of
from rayloom_engine.models.on_library.decoder import BLOCK_SIZE
from rt_adapters import peft_logits, write_adapter
from rt_library import ISAS, LibraryModel, library_cache, load_on_library, open_library, to_torch
from rt_tiny import VOCAB_SIZE, TinySequence, make_batch, tiny_variant

NUM_TOKENS = 37
BLOCKS = -(-NUM_TOKENS // BLOCK_SIZE)
VARIANTS = ("llama-biases", "qwen3")
# Rank and settings of each adapter. LoRA ranks are padded to a multiple of 16, so rank 100 becomes 112. With rank 112,
# q, k and v have 3 x 112 rows of A, which is more than the library multiplies in one piece.
ADAPTERS = (
    {"rank": 8},
    {"rank": 24, "lora_alpha": 48, "matrices": ("q_proj", "v_proj")},
    {"rank": 16, "use_rslora": True, "lora_alpha": 4, "matrices": ("k_proj", "o_proj", "up_proj")},
    {"rank": 8, "matrices": ("gate_proj", "down_proj"), "alpha_pattern": {"down_proj": 2}},
    {"rank": 100},
)

pytestmark = pytest.mark.skipif(not ISAS, reason="there is no C library")


@dataclass(frozen=True)
class Case:
    folder: Path
    adapters: tuple[Path, ...]


@dataclass(frozen=True)
class Alone:
    """A model with all adapters in slots, and the logits [T, V] of a sequence that runs alone.

    `expected` has the logits with each adapter, then those without an adapter (`expected[-1]`).
    """

    model: LibraryModel
    expected: tuple[torch.Tensor, ...]


def token_ids_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=NUM_TOKENS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    made = {}
    for variant in VARIANTS:
        folder = tiny_variant(tmp_path_factory.mktemp(variant), variant)
        parent = tmp_path_factory.mktemp("adapters")
        adapters = [write_adapter(parent / str(i), folder, seed=i, **each) for i, each in enumerate(ADAPTERS)]
        made[variant] = Case(folder, tuple(adapters))
    return made


def load(case: Case, isa: str, dtype: torch.dtype, quantization: Quantization = "none") -> LibraryModel:
    model = load_on_library(case.folder, isa, dtype, quantization=quantization)
    for slot, folder in enumerate(case.adapters):
        model.load_adapter(AdapterLoad(slot, adapter_of(folder)))
    return model


def logits_of(
    model: LibraryModel,
    cache: LibraryPages,
    steps: Sequence[tuple[TinySequence, int, int]],
    wanted_rows: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Computes (sequence, number of tokens, adapter slot) in one step; returns the logits of each."""
    counts = [count for _, count, _ in steps]
    ends = [sequence.num_computed + count for sequence, count, _ in steps]
    tables = [sequence.block_table for sequence, _, _ in steps]
    batch = make_batch(counts, ends, tables, BLOCK_SIZE)
    positions = [p for sequence, count, _ in steps for p in range(sequence.num_computed, sequence.num_computed + count)]
    ids = [i for s, count, _ in steps for i in s.token_ids[s.num_computed : s.num_computed + count]]
    slots = np.repeat(np.array([slot for _, _, slot in steps], dtype=np.int32), counts)
    paged = PagedBatch(
        query_lens=batch.query_lens,
        context_lens=batch.context_lens,
        block_tables_SB=batch.block_tables_SB.numpy(),
        slot_mapping_T=batch.slot_mapping_T.numpy(),
        adapters_T=slots if max(slots) >= 0 else None,
    )
    hidden_TD = model.decoder.forward(np.array(ids), np.array(positions), paged, cache, wanted_rows=wanted_rows)
    logits = to_torch(model.decoder.logits(hidden_TD))
    for sequence, count, _ in steps:
        sequence.num_computed += count
    return list(logits.split(counts))


def alone(model: LibraryModel, slot: int, seed: int = 0) -> torch.Tensor:
    sequence = TinySequence(token_ids_of(seed), range(BLOCKS))
    (logits,) = logits_of(model, library_cache(model, BLOCKS), [(sequence, NUM_TOKENS, slot)])
    return logits


@pytest.fixture(
    scope="module",
    params=[
        (isa, dtype, quantization)
        for isa in ISAS
        for dtype, quantization in ((torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "int8"))
    ],
    ids=str,
)
def models(request: pytest.FixtureRequest, folders: dict[str, Case]) -> list[Alone]:
    made = []
    for case in folders.values():
        model = load(case, *request.param)
        made.append(Alone(model, tuple(alone(model, slot) for slot in (*range(len(ADAPTERS)), -1))))
    return made


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_peft(folders: dict[str, Case], isa: str, variant: str) -> None:
    case = folders[variant]
    model = load(case, isa, torch.float32)
    for slot, adapter in enumerate(case.adapters):
        expected = peft_logits(case.folder, adapter, token_ids_of(0))
        torch.testing.assert_close(alone(model, slot), expected, rtol=1e-4, atol=1e-4)
        assert (expected - alone(model, -1)).abs().max() > 0.1  # the adapter matters


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_logits_depend_neither_on_chunks_nor_on_the_adapters_of_other_sequences(
    models: list[Alone], data: st.DataObject
) -> None:
    case = models[data.draw(st.integers(0, len(models) - 1), label="variant")]
    open_library(ISAS[0], data.draw(st.integers(1, 4), label="threads"))
    slots = data.draw(st.lists(st.integers(-1, len(ADAPTERS) - 1), min_size=1, max_size=9), label="adapters")
    cache = library_cache(case.model, len(slots) * BLOCKS)
    sequences = [
        TinySequence(token_ids_of(0), range(index * BLOCKS, (index + 1) * BLOCKS)) for index in range(len(slots))
    ]
    parts: list[list[torch.Tensor]] = [[] for _ in slots]
    while unfinished := [index for index, each in enumerate(sequences) if each.num_computed < NUM_TOKENS]:
        steps = []
        for index in unfinished:
            left = NUM_TOKENS - sequences[index].num_computed
            steps.append((sequences[index], data.draw(st.integers(1, left), label="chunk"), slots[index]))
        for index, logits in zip(unfinished, logits_of(case.model, cache, steps), strict=True):
            parts[index].append(logits)
    for slot, found in zip(slots, parts, strict=True):
        assert torch.equal(torch.cat(found), case.expected[slot])


def test_rows_that_nobody_reads_change_nothing(models: list[Alone]) -> None:
    for case in models:
        cache = library_cache(case.model, 3 * BLOCKS)
        steps = [
            (TinySequence(token_ids_of(0), range(index * BLOCKS, (index + 1) * BLOCKS)), NUM_TOKENS, slot)
            for index, slot in enumerate((1, -1, 0))
        ]
        wanted = [NUM_TOKENS - 1, 2 * NUM_TOKENS - 1, 3 * NUM_TOKENS - 1]
        found = logits_of(case.model, cache, steps, wanted)
        for (_, _, slot), logits in zip(steps, found, strict=True):
            assert torch.equal(logits[-1], case.expected[slot][-1])


def test_a_chunk_of_a_prompt_of_which_nothing_is_sampled_leaves_the_cache_for_the_next(models: list[Alone]) -> None:
    for case in models:
        cache = library_cache(case.model, BLOCKS)
        for slot in (1, -1, 0):
            sequence = TinySequence(token_ids_of(0), range(BLOCKS))
            logits_of(case.model, cache, [(sequence, 20, slot)], [])
            (found,) = logits_of(case.model, cache, [(sequence, NUM_TOKENS - 20, slot)])
            assert torch.equal(found, case.expected[slot][20:])


def test_another_adapter_in_a_slot_replaces_the_first(folders: dict[str, Case]) -> None:
    case = folders[VARIANTS[0]]
    model = load(case, ISAS[0], torch.float32)
    first, second = alone(model, 0), alone(model, 1)
    model.load_adapter(AdapterLoad(0, adapter_of(case.adapters[1])))
    assert torch.equal(alone(model, 0), second)
    model.load_adapter(AdapterLoad(1, adapter_of(case.adapters[0])))
    assert torch.equal(alone(model, 1), first)


@pytest.mark.parametrize("isa", ISAS)
def test_an_adapter_that_cannot_be_loaded_gives_no_token_of_the_plain_model(folders: dict[str, Case], isa: str) -> None:
    model = load(folders["qwen3"], isa, torch.bfloat16)
    usable = adapter_of(folders["qwen3"].adapters[1])
    expected = alone(model, 1), alone(model, -1)
    with pytest.raises(ModelError, match="have changed"):
        model.load_adapter(AdapterLoad(1, Adapter(usable.path, bytes(16))))
    sequences = [TinySequence(token_ids_of(0), range(index * BLOCKS, (index + 1) * BLOCKS)) for index in range(2)]
    steps = [(sequence, NUM_TOKENS, slot) for sequence, slot in zip(sequences, (1, -1), strict=True)]
    with_it, without = logits_of(model, library_cache(model, 2 * BLOCKS), steps)
    assert with_it.isnan().all()
    assert torch.equal(without, expected[1])
    model.load_adapter(AdapterLoad(1, usable))
    assert torch.equal(alone(model, 1), expected[0])
