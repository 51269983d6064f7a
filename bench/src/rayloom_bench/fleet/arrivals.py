"""Requests that arrive at a fleet. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Ids of a segment are consecutive from its number times this, so different segments have no id in common.
_MOST_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt: the first `num_tokens` tokens of the text with this number."""

    text: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request. Two prompts have the same prefix as far as their segments are equal."""

    at_s: float
    prompt: tuple[Segment, ...]
    num_output: int
    tenant: str = ""

    @property
    def num_prompt(self) -> int:
        return sum(segment.num_tokens for segment in self.prompt)

    def prompt_ids(self) -> tuple[int, ...]:
        """Returns token ids. They belong to no vocabulary, but prompts have equal ids where their texts are equal."""
        ids: list[int] = []
        for segment in self.prompt:
            first = segment.text * _MOST_TOKENS
            ids.extend(range(first, first + segment.num_tokens))
        return tuple(ids)
