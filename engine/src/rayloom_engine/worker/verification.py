"""Verification of drafts: which rows of a step are sampled, and which sampled tokens count.

A slot with a draft of k tokens has k + 1 rows: the row of its newest token and those of the draft. Row i is sampled as
if the first i draft tokens were the slot's own, with the noise of its own position. Its token counts if these i tokens
are the tokens of the rows before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayloom_engine.core.step import SlotStep
from rayloom_engine.worker.slots import Slot

Steps = Sequence[tuple[SlotStep, Slot]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rows of one slot mean."""

    num_tokens: int  # the tokens of so many rows, from the first on, are the slot's next tokens; 0 if it is corrupt
    is_dirty: bool = False  # the logits of a later row are not finite

    @property
    def is_corrupt(self) -> bool:
        """True if the slot's next token cannot be chosen: the logits of a row that counts are not finite."""
        return self.num_tokens == 0


def verdict(draft: Sequence[int], token_ids: Sequence[int | None]) -> Verdict:
    """Returns which rows count. `token_ids`: the sampled token of each row; None if its logits are not finite."""
    assert len(token_ids) == len(draft) + 1, f"{len(token_ids)} rows for a draft of {len(draft)}"
    for row, token_id in enumerate(token_ids):
        if token_id is None:
            return Verdict(0)
        if row == len(draft) or token_id != draft[row]:
            return Verdict(row + 1, is_dirty=None in token_ids[row + 1 :])
    raise AssertionError("the last row ends the draft")


def sampled_slots(steps: Steps) -> list[Slot]:
    """Returns for each row that is sampled its slot as the sampler shall see it."""
    slots = []
    for step, slot in steps:
        slots.append(slot)
        slots += [slot.after_draft(num) for num in range(1, len(step.draft_token_ids) + 1)]
    return slots


def sampled_rows(steps: Steps, ends: Iterable[int]) -> list[int]:
    """Returns the rows of the step's hidden states that are sampled, ascending.

    `ends`: for each of `steps`, the row after its last token.
    """
    rows: list[int] = []
    for (step, _), end in zip(steps, ends, strict=True):
        rows += range(end - 1 - len(step.draft_token_ids), end)
    return rows
