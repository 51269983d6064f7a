"""Masks of a draft's rows: row i gets the mask that the slot would have if the draft's first i tokens were its own.

The grammar and the reasoning follow the draft. Afterwards both return to their state before the draft, because the
draft may be wrong. If the mask before a draft token does not allow the token, the token cannot be accepted. So the rows
from this token on need no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from rayloom_engine.errors import GrammarFault
from rayloom_engine.grammar.matcher import Mask
from rayloom_engine.worker.bans import mask_slot
from rayloom_engine.worker.slots import Slot


def masked_rows(slot: Slot, draft: tuple[int, ...], vocab_size: int, has_time: Callable[[], bool]) -> list[Slot]:
    """Returns the slot after the draft's first 1, 2, ... tokens, each with its mask. `slot.allowed` must be set.

    If the mask before a draft token does not allow the token, the list ends before this token. It also ends when
    `has_time` returns False, and at a fault of the grammar. Such a fault is not raised, because only tokens of the slot
    itself may end a sequence.
    """
    rows: list[Slot] = []
    form = slot.form
    if form is not None and not form.may_follow_ahead:
        return rows
    if not _is_in(slot.allowed, draft[0]) or not has_time():
        return rows
    thinking = None if slot.thinking is None else slot.thinking.copy()
    try:
        with nullcontext() if form is None else form.ahead():
            for num, token_id in enumerate(draft, 1):
                if form is not None:
                    form.append((token_id,))
                if thinking is not None:
                    thinking.append((token_id,))
                row = slot.after_draft(num)
                row.form = form
                row.thinking = thinking
                mask_slot(row, vocab_size)
                row.form = row.thinking = None  # form and thinking follow the draft further than this row
                rows.append(row)
                if num == len(draft) or not _is_in(row.allowed, draft[num]) or not has_time():
                    break
    except GrammarFault:
        pass
    return rows


def _is_in(allowed: Mask | None, token_id: int) -> bool:
    return allowed is None or bool(int(allowed[token_id // 32]) >> token_id % 32 & 1)
