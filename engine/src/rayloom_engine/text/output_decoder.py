"""OutputDecoder: turns one sequence's tokens into text and applies stop strings. Used by the front and by `LLM`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.sampling_params import SamplingParams
from rayloom_engine.text.detokenizer import make_detokenizer
from rayloom_engine.text.stop_strings import StopAutomaton, StopStrings
from rayloom_engine.text.tokenizer import Tokenizer


# A msgspec.Struct, because a delta is made for each token, and a dataclass would take ten times as long to construct.
class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The text of new tokens.

    The text is empty if all tokens are special tokens, part of a character, or a possible start of a stop string.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id, if requested
    finish_reason: str | None = None  # "stop" | "length"
    stop_reason: str | int | None = None  # the stop string or stop token id; None for EOS


class OutputDecoder:
    """The decoding state of one sequence. Drops tokens after a stop string, as if they had not been generated."""

    __slots__ = ("_detokenizer", "_eos_token_ids", "_is_simple", "_params", "_stops", "finish_reason", "num_tokens")

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        prompt_ids: Sequence[int] = (),
        stops: StopAutomaton | None = None,
        kept_ids: Collection[int] = (),
    ) -> None:
        """`stops`: the automaton of `params.stop_strings`, if several sequences share one.

        `kept_ids`: special tokens that stay in the text, because a parser reads them.
        """
        self._params = params
        self._eos_token_ids = frozenset(eos_token_ids)
        self._detokenizer = make_detokenizer(
            tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens, kept_ids=kept_ids
        )
        stops = StopAutomaton(params.stop_strings) if stops is None else stops
        self._is_simple = stops.is_empty and params.max_tokens != 0
        self._stops = StopStrings(stops, include_in_output=params.include_stop_str_in_output)
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def simple_text(self, token_ids: Sequence[int]) -> str | None:
        """Returns the text of new tokens that do not end the sequence. Takes a tenth of the time of `add`.

        Returns None, without any effect, if the sequence has stop strings or `max_tokens` 0: these need `add`.
        """
        if not self._is_simple:
            return None
        self.num_tokens += len(token_ids)
        add = self._detokenizer.add
        return add(token_ids[0]) if len(token_ids) == 1 else "".join(map(add, token_ids))

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        finish_reason: str | None = None,
        stop_token_id: int | None = None,
    ) -> TextDelta:
        """Returns the delta for newly generated tokens. `stop_token_id`: the last token, if it ended the sequence.

        If a stop string sets the delta's finish_reason, the engine still computes the sequence. The caller then has to
        abort the sequence.
        """
        if self._params.max_tokens == 0:
            # The engine always samples a token after the prompt. With max_tokens 0 this token is not part of the
            # answer.
            self.finish_reason = "length" if finish_reason is not None else None
            return TextDelta(text="", token_ids=(), logprobs=(), finish_reason=self.finish_reason)
        simple = self.simple_text(token_ids) if finish_reason is None else None
        if simple is not None:  # the usual case
            return TextDelta(text=simple, token_ids=tuple(token_ids), logprobs=tuple(logprobs))
        text = ""
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            is_stop_token = stop_token_id is not None and position == len(token_ids) - 1
            if is_stop_token and not self._params.include_stop_str_in_output:
                continue
            # like EOS, a stop string has no effect among the first min_tokens
            may_stop = self.num_tokens > self._params.min_tokens
            text += self._stops.add(self._detokenizer.add(token_id), may_stop=may_stop)
            if self._stops.found is not None:
                self.finish_reason = "stop"
                kept = position + 1
                return TextDelta(
                    text=text,
                    token_ids=tuple(token_ids[:kept]),
                    logprobs=tuple(logprobs[:kept]),
                    finish_reason="stop",
                    stop_reason=self._stops.found,
                )
        stop_reason: str | int | None = None
        if finish_reason is not None:
            self.finish_reason = finish_reason
            text += self._stops.add(self._detokenizer.finish(), may_stop=False) + self._stops.finish()
            if stop_token_id is not None and stop_token_id not in self._eos_token_ids:
                stop_reason = stop_token_id
        return TextDelta(
            text=text,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
