"""Verification of drafts: decides which rows of a step are sampled, and which sampled tokens count.

A slot with a draft of k tokens has k + 1 rows: one for its newest token, one for each draft token. Row i is sampled as
if the first i draft tokens were the slot's own, with the noise of the row's position. The token of row i counts if
these i draft tokens equal the sampled tokens of the rows before row i.

If the slot has a mask, the rows after an illegal draft token have no mask (draft_masks.py). The tokens of these rows
never count, but the logits must be finite in all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayloom_engine.core.step import SlotStep
from rayloom_engine.worker.slots import Slot

Steps = Sequence[tuple[SlotStep, Slot]]


@dataclass(frozen=True, slots=True)
class AcceptedRows:
    """The meaning of the rows of one slot."""

    num_tokens: int  # the tokens of this many rows, from the first row on, are the slot's next tokens
    is_corrupt: bool = False  # the slot has no draft, and its logits are not finite
    # The slot has a draft, and the logits of a row are not finite. Masked attention multiplies the KV of later rows by
    # zero, and zero times NaN is NaN. So a wrong draft token may be the cause, and the slot is computed again without
    # its draft.
    is_dirty: bool = False


def accepted_rows(
    draft: Sequence[int], token_ids: Sequence[int | None], num_verified: int | None = None
) -> AcceptedRows:
    """Returns which rows count. `token_ids`: the sampled token of each row; None if its logits are not finite.

    `num_verified`: only this many tokens of the draft can be accepted; None: all of them.
    """
    assert len(token_ids) == len(draft) + 1, f"{len(token_ids)} rows for a draft of {len(draft)}"
    if not draft:
        return AcceptedRows(0, is_corrupt=True) if token_ids[0] is None else AcceptedRows(1)
    most = len(draft) if num_verified is None else num_verified
    num = 0
    for row, token_id in enumerate(token_ids):
        if token_id is None:
            break
        num += 1
        if row == most or token_id != draft[row]:
            break
    return AcceptedRows(num, is_dirty=None in token_ids)


def sampled_slots(steps: Steps, masked: Mapping[int, list[Slot]] | None = None) -> list[Slot]:
    """Returns for each sampled row the slot with the tokens up to this row, as the sampler reads it.

    `masked`: slot number -> the rows of its draft that have masks (StepMasks.after_drafts).
    """
    slots = []
    for step, slot in steps:
        slots.append(slot)
        rows = masked.get(step.slot, []) if masked else []
        slots += rows
        slots += [slot.after_draft(num) for num in range(len(rows) + 1, len(step.draft_token_ids) + 1)]
    return slots


def sampled_rows(steps: Steps, ends: Iterable[int]) -> list[int]:
    """Returns the rows of the step's hidden states that are sampled, ascending.

    `ends`: for each of `steps`, the row after its last token.
    """
    rows: list[int] = []
    for (step, _), end in zip(steps, ends, strict=True):
        rows += range(end - 1 - len(step.draft_token_ids), end)
    return rows
