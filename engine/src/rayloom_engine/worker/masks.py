"""Masks: sets the tokens that each slot of a step may sample, within a limited CPU time.

A slot is postponed for one of three reasons. Its grammar is still being built. Or the masks of other slots have used
the step's time. Or its grammar could not consume all tokens within this time, for example after a preemption. A
postponed slot gets no token, and the core schedules its newest token again in a later step. So a costly grammar does
not slow the other sequences. The masks of drafts are set last, in the time that is left. Draft tokens without a mask
are not accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rayloom_engine.core.step import BrokenForm, SlotStep
from rayloom_engine.errors import GrammarFault
from rayloom_engine.worker.bans import mask_slot
from rayloom_engine.worker.draft_masks import masked_rows
from rayloom_engine.worker.forms import Form, Forms
from rayloom_engine.worker.slots import Slot

# After this CPU time for masks, the remaining slots of the step are postponed. A usual mask takes 5 to 15 us, a costly
# mask 7 ms.
MASKS_S = 0.02


@dataclass(slots=True)
class StepMasks:
    """The slots of a step that get no token, the rows of drafts with masks, and the time of a wait for a grammar."""

    # slot number -> the slot after 1, 2, ... tokens of its draft, with masks; only slots with a form or thinking
    after_drafts: dict[int, list[Slot]] = field(default_factory=dict)
    broken: dict[int, BrokenForm] = field(default_factory=dict)
    postponed: set[int] = field(default_factory=set)
    waited_s: float = 0.0

    def postpone(self, step: SlotStep, slot: Slot) -> None:
        """Records that the slot gets no token in this step."""
        self.postponed.add(step.slot)
        slot.allowed = None
        slot.num_postponed += 1


class Masks:
    """Sets masks, and remembers the slots that wait for their grammars."""

    def __init__(self, forms: Forms | None, vocab_size: int, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self._forms = forms
        self._vocab_size = vocab_size
        self._cpu_clock = cpu_clock
        self._waiting: dict[int, Form | Forms] = {}  # slot -> what is not built yet: its form or the vocabulary

    def set(self, steps: Sequence[tuple[SlotStep, Slot]], *, is_whole_step: bool) -> StepMasks:
        """Sets the masks of slots that sample. Returns the slots that get no token.

        `is_whole_step`: the step computes only the slots in `steps`. If all of these wait for their grammars, the step
        waits for the grammar of the first slot, but at most 0.1 s.
        """
        result = StepMasks()
        limited = [pair for pair in steps if pair[1].form is not None or pair[1].thinking is not None]
        if not limited:
            return result
        if is_whole_step and len(limited) == len(steps):
            unbuilt = [needed for _, slot in limited if (needed := self._unbuilt(slot)) is not None]
            if len(unbuilt) == len(steps):
                began = time.perf_counter()
                unbuilt[0].wait_a_slice()
                result.waited_s = time.perf_counter() - began
        limited.sort(key=lambda pair: -pair[1].num_postponed)
        end = None  # CPU time after which slots are postponed; None before the first mask
        for step, slot in limited:
            needed = self._unbuilt(slot)
            if needed is not None or (end is not None and self._cpu_clock() > end):
                result.postpone(step, slot)
                if needed is not None:
                    self._waiting[step.slot] = needed
                continue
            end = end or self._cpu_clock() + MASKS_S
            try:
                if slot.form is not None and not slot.form.catch_up(partial(self._is_before, end)):
                    result.postpone(step, slot)
                    continue
                slot.num_postponed = 0
                mask_slot(slot, self._vocab_size)
            except GrammarFault as fault:
                result.broken[step.slot] = BrokenForm(step.slot, f"the form of the answer cannot be kept: {fault}")
        for step, slot in limited:
            if step.draft_token_ids:
                is_masked = step.slot not in result.postponed and step.slot not in result.broken
                result.after_drafts[step.slot] = self._after_draft(step, slot, end) if is_masked else []
        return result

    def _after_draft(self, step: SlotStep, slot: Slot, end: float | None) -> list[Slot]:
        """Returns the slot after 1, 2, ... tokens of its draft, with masks. No mask is set after CPU time `end`."""
        return masked_rows(slot, step.draft_token_ids, self._vocab_size, partial(self._is_before, end))

    def _is_before(self, end: float | None) -> bool:
        return end is None or self._cpu_clock() <= end

    def _unbuilt(self, slot: Slot) -> Form | Forms | None:
        """Returns what must be built before the slot's mask can be set; None if nothing is missing."""
        # Thinking needs only the vocabulary, for the bytes of tokens. A form counts as built only with its vocabulary.
        needed = self._forms if slot.form is None and slot.thinking is not None else slot.form
        return None if needed is None or needed.is_built else needed

    def waiting_slots(self) -> tuple[int, ...]:
        """Returns the slots that were postponed and whose grammars are not built yet."""
        if not self._waiting:
            return ()
        assert self._forms is not None
        self._forms.note_wait()
        self._waiting = {slot: form for slot, form in self._waiting.items() if not form.is_built}
        return tuple(sorted(self._waiting))

    def forget(self, slots: Sequence[int]) -> None:
        """Forgets slots that were freed."""
        for slot in slots:
            self._waiting.pop(slot, None)
