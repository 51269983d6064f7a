"""Reasoning formats: the tags around a model's reasoning, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning is at the beginning of an answer, between two tags. Without an end tag, all text is reasoning."""

    name: str
    start: str
    end: str
    begins_open: bool = False  # the answer begins inside the reasoning, even if the prompt has no start tag at its end
    call_ends_it: bool = True  # a tool call ends the reasoning, too

    def is_open(self, prompt: str, *, is_inside_message: bool = False) -> bool:
        """True if an answer to `prompt` begins inside the reasoning. Earlier turns in the prompt have no effect.

        If a template switches the reasoning off, it ends the prompt with an end tag. `is_inside_message`: the prompt
        ends inside an assistant's message, which the answer continues.
        """
        if is_inside_message:
            return prompt.rfind(self.start) > prompt.rfind(self.end)
        end = prompt.rstrip()
        if end.endswith(self.start):
            return True
        return self.begins_open and not end.endswith(self.end)


QWEN3 = ReasoningFormat(name="qwen3", start="<think>", end="</think>")
REASONING_FORMATS = MappingProxyType(
    {
        format.name: format
        for format in (
            QWEN3,
            ReasoningFormat(name="deepseek_r1", start="<think>", end="</think>", begins_open=True),
            ReasoningFormat(name="mistral", start="[THINK]", end="[/THINK]"),
            ReasoningFormat(name="seed_oss", start="<seed:think>", end="</seed:think>"),
            ReasoningFormat(name="granite", start="Here is my thought process:", end="Here is my response:"),
        )
    }
)
