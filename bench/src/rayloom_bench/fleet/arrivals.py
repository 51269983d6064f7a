"""Requests that arrive at a fleet. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# A text's token ids are consecutive and begin at the text's number times this value. So two texts share no id.
_MOST_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt: the first `num_tokens` tokens of text number `text`."""

    text: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request. Two prompts have a common prefix if their first segments are of the same text."""

    at_s: float
    prompt: tuple[Segment, ...]
    num_output: int
    tenant: str = ""

    @property
    def num_prompt(self) -> int:
        return sum(segment.num_tokens for segment in self.prompt)

    def prompt_ids(self) -> tuple[int, ...]:
        """Returns the token ids of the prompt. They belong to no vocabulary, but equal texts have equal ids."""
        ids: list[int] = []
        for segment in self.prompt:
            first = segment.text * _MOST_TOKENS
            ids.extend(range(first, first + segment.num_tokens))
        return tuple(ids)
