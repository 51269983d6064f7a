"""InputBatch: the input arrays of a step, made from its slots with numpy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from rayloom_engine.core.step import SlotStep
from rayloom_engine.kv.paged_batch import PagedBatch
from rayloom_engine.models.given_rows import EmbedsAt
from rayloom_engine.worker.block_tables import BlockTables
from rayloom_engine.worker.slots import Slot


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The tokens of a step. T = tokens of all its sequences; the tokens of one sequence are neighbours in T."""

    steps: list[tuple[SlotStep, Slot]]  # sequences with one token first
    token_ids_T: npt.NDArray[np.int64]
    positions_T: npt.NDArray[np.int64]  # from 0 in each sequence
    ends: list[int]  # for each sequence, the index in T after its last token
    attention: PagedBatch
    embeds: tuple[EmbedsAt, ...] = ()  # given rows of embeddings; `token_ids_T` has placeholders there


def build_batch(
    steps: list[tuple[SlotStep, Slot]], tables: BlockTables, block_size: int, *, has_adapters: bool = False
) -> InputBatch:
    """Builds the batch of one step. Decodes come first, because attention computes them together.

    `tables`: the block tables of the slots. `has_adapters`: a slot may have an adapter. Decodes with the same adapter
    are then neighbours, and so are chunks with the same adapter. So one product computes all neighbours with the same
    adapter. The number of numpy calls does not depend on the number of sequences with one token; each longer chunk
    needs two more calls.
    """
    if has_adapters:
        steps = sorted(steps, key=_adapter_slot)
    singles = [item for item in steps if item[0].num_tokens == 1]
    chunks = [item for item in steps if item[0].num_tokens > 1] if len(singles) < len(steps) else []
    ordered = [*singles, *chunks]
    num_singles = len(singles)
    query_lens = [1] * num_singles + [step.num_tokens for step, _ in chunks]
    starts_S = np.array([step.start for step, _ in ordered])
    slots_S = np.array([step.slot for step, _ in ordered])
    context_lens_S = starts_S + np.array(query_lens)
    ends = list(accumulate(query_lens))
    positions_T = np.empty(ends[-1], dtype=np.int64)
    positions_T[:num_singles] = starts_S[:num_singles]
    token_ids_T = np.empty(ends[-1], dtype=np.int64)
    token_ids_T[:num_singles] = [
        slot.newest if step.start + 1 == slot.num_tokens else slot.token_ids[step.start] for step, slot in singles
    ]
    for (step, slot), end in zip(chunks, ends[num_singles:], strict=True):
        begin = end - step.num_tokens
        positions_T[begin:end] = np.arange(step.start, step.start + step.num_tokens)
        token_ids_T[begin:end] = slot.token_ids[step.start : step.start + step.num_tokens]
    slots_T = np.repeat(slots_S, query_lens) if chunks else slots_S
    num_blocks_S = -(-context_lens_S // block_size)
    return InputBatch(
        steps=ordered,
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        ends=ends,
        embeds=tuple(
            EmbedsAt(end - step.num_tokens, step.embeds)
            for (step, _), end in zip(ordered, ends, strict=True)
            if step.embeds is not None
        ),
        attention=PagedBatch(
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens_S.tolist()),
            block_tables_SB=tables.rows(slots_S, num_blocks_S),
            slot_mapping_T=tables.places(slots_T, positions_T, block_size),
            adapters_T=_adapters(ordered, query_lens) if has_adapters else None,
        ),
    )


def _adapter_slot(item: tuple[SlotStep, Slot]) -> int:
    return item[1].adapter_slot


def _adapters(ordered: list[tuple[SlotStep, Slot]], query_lens: list[int]) -> npt.NDArray[np.int32] | None:
    """Returns the adapter slot of each token; None if no token has an adapter."""
    adapters = [slot.adapter_slot for _, slot in ordered]
    return np.repeat(np.array(adapters, dtype=np.int32), query_lens) if max(adapters) >= 0 else None
