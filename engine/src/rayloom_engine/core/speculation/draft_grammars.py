"""The interface through which the scheduler cuts drafts to the tokens that a sequence's grammar allows.

`worker.draft_forms` implements it. The ranks set the masks of a draft's rows in any case, so a token never depends on
this interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rayloom_engine.core.decoding import DecodingParams


class DraftGrammar(Protocol):
    """The grammar of one sequence."""

    def fit(self, token_ids: Sequence[int], draft: tuple[int, ...], num: int) -> tuple[int, ...]:
        """Returns the legal prefix of `draft`. `token_ids`: the prompt and the answer so far, before the draft.

        If no token of the draft is legal, returns at most `num` tokens that the grammar forces. Returns () if the
        grammar forces none or is not built yet, or if the step has no time left for grammars. Between two calls, tokens
        are only appended to `token_ids`.
        """


class DraftGrammars(Protocol):
    """Makes the grammars of sequences."""

    def begin_step(self) -> None:
        """Begins the time that all drafts of a step have together. Call it before the first draft of the step."""

    def begin(self, params: DecodingParams, num_prompt_tokens: int) -> DraftGrammar:
        """Returns the grammar of a sequence. `params.grammar` is not empty."""
