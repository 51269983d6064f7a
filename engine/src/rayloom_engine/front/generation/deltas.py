"""ChoiceDelta and ChoiceResult: the part of a choice that is new since the last delta, and a whole choice."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.text.output_decoder import TextDelta


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one choice that is new since its last delta."""

    index: int
    text: TextDelta
    is_first: bool
    # set only in the first delta; the prompt's first token has no entry
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True, kw_only=True)
class ChoiceResult:
    """A complete choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def whole_text(self) -> TextDelta:
        """Returns the whole choice as a single delta, without log-probabilities."""
        return TextDelta(
            text=self.text,
            token_ids=tuple(self.token_ids),
            logprobs=(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text.text
        self.token_ids.extend(delta.text.token_ids)
        self.logprobs.extend(delta.text.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason = delta.text.finish_reason
        self.stop_reason = delta.text.stop_reason
