"""DraftForms: cuts the drafts of the scheduler to the tokens that grammars allow, before ranks compute these drafts.

The core has a form of its own for each sequence with a grammar and drafts. If the only rank is in the core's process,
both share the vocabulary and the built grammars.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.errors import GrammarFault
from rayloom_engine.worker.forms import Form, Forms

# After this CPU time for grammars, the remaining sequences of the step with a grammar get no draft. If a single draft
# of a sequence took longer than this, the sequence gets no more drafts. To check a draft of 5 tokens takes 3 us. To
# find a forced text takes 0.2 to 2 us for each byte of the text, also for the bytes behind the draft. A forced text may
# have 250,000 bytes.
DRAFTS_S = 0.005


class DraftForms:
    """Implements core.speculation.draft_grammars.DraftGrammars."""

    def __init__(self, forms: Forms, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self.forms = forms
        self.cpu_clock = cpu_clock
        self._end: float | None = None  # CPU time after which the step checks no drafts; None before the first check

    def begin_step(self) -> None:
        """Begins a step: the checks from now on have DRAFTS_S seconds of CPU time together."""
        self._end = None

    def begin(self, params: DecodingParams, num_prompt_tokens: int) -> DraftForm:
        """Returns the grammar of a sequence. If it is not built yet, the thread of the forms begins to build it."""
        return DraftForm(self, self.forms.begin(params), num_prompt_tokens)

    def has_time(self) -> bool:
        """True if the step may check a further draft."""
        now = self.cpu_clock()
        if self._end is None:
            self._end = now + DRAFTS_S
        return now <= self._end


class DraftForm:
    """Implements core.speculation.draft_grammars.DraftGrammar."""

    def __init__(self, owner: DraftForms, form: Form, num_prompt_tokens: int) -> None:
        self._owner = owner
        self._form = form
        self._num_read = num_prompt_tokens  # the prompt's tokens, and the generated tokens that the form has
        self._has_drafts = form.may_follow_ahead

    def fit(self, token_ids: Sequence[int], draft: tuple[int, ...], num: int) -> tuple[int, ...]:
        """Returns the legal prefix of `draft`; if it is empty, at most `num` forced tokens."""
        if not self._form.is_built:
            self._owner.forms.note_wait()
            return ()
        if not self._has_drafts or not self._owner.has_time():
            return ()
        self._form.append(token_ids[self._num_read :])
        self._num_read = len(token_ids)
        clock = self._owner.cpu_clock
        try:
            if not self._form.catch_up(self._owner.has_time):
                return ()
            began = clock()
            found = draft[: self._form.legal_prefix(draft)] or tuple(self._form.forced()[:num])
            self._has_drafts = clock() - began <= DRAFTS_S
        except GrammarFault:
            return ()  # the rank reports a fault of the sequence itself
        return found
