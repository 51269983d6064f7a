"""InputBatch: the tensors that the model takes, made from the slots of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rayloom_engine.core.step import SlotStep
from rayloom_engine.kernels.attention import AttentionBatch
from rayloom_engine.worker.slots import Slot


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The tokens of a step. T = tokens of all its sequences; the tokens of one sequence are neighbours in T."""

    steps: list[tuple[SlotStep, Slot]]  # sequences with one token first
    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    ends: list[int]  # for each sequence, the index in T after its last token
    attention: AttentionBatch


def build_batch(steps: list[tuple[SlotStep, Slot]], block_size: int, device: torch.device) -> InputBatch:
    """Builds the batch of one step. Decodes come first, because attention computes them together."""
    ordered = sorted(steps, key=lambda item: item[0].num_tokens > 1)
    num_tokens = sum(step.num_tokens for step, _ in ordered)
    token_ids = np.empty(num_tokens, dtype=np.int64)
    positions = np.empty(num_tokens, dtype=np.int64)
    slot_mapping = np.empty(num_tokens, dtype=np.int64)
    context_lens = [step.start + step.num_tokens for step, _ in ordered]
    width = max(-(-length // block_size) for length in context_lens)
    block_tables = np.zeros((len(ordered), width), dtype=np.int64)
    ends = []
    end = 0
    for row, (step, slot) in enumerate(ordered):
        begin, end = end, end + step.num_tokens
        ends.append(end)
        where = np.arange(step.start, step.start + step.num_tokens)
        token_ids[begin:end] = slot.token_ids[step.start : step.start + step.num_tokens]
        positions[begin:end] = where
        slot_mapping[begin:end] = slot.block_table[where // block_size] * block_size + where % block_size
        used = -(-context_lens[row] // block_size)
        block_tables[row, :used] = slot.block_table[:used]
    return InputBatch(
        steps=ordered,
        token_ids_T=torch.from_numpy(token_ids).to(device),
        positions_T=torch.from_numpy(positions).to(device),
        ends=ends,
        attention=AttentionBatch(
            query_lens=tuple(step.num_tokens for step, _ in ordered),
            context_lens=tuple(context_lens),
            block_tables_SB=torch.from_numpy(block_tables).to(device),
            slot_mapping_T=torch.from_numpy(slot_mapping).to(device),
        ),
    )
