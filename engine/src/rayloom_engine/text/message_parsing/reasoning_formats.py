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
    call_ends_it: bool = True  # a tool call ends the reasoning, too, but the mere mention of a call's tag does not

    def is_open(self, prompt: str, *, continued: str | None = None) -> bool:
        """True if an answer to `prompt` begins inside the reasoning. Earlier turns in the prompt have no effect.

        If a template switches the reasoning off, it ends the prompt with an end tag. `continued`: text of the last
        message, if the prompt ends with this text and the answer continues it.
        """
        if continued is not None:
            return self._is_open_inside(prompt, continued.strip())
        end = prompt.rstrip()
        if end.endswith(self.start):
            return True
        return self.begins_open and not end.endswith(self.end)

    def _is_open_inside(self, prompt: str, message: str) -> bool:
        """True if the last tag opens the reasoning and is in `message`, or was written directly before by the template.

        Any other tag before the message is in an earlier one, such as a user's question about tags.
        """
        start = prompt.rfind(self.start)
        if start <= prompt.rfind(self.end):
            return False
        message_at = prompt.rfind(message)
        return start >= message_at or not prompt[start + len(self.start) : message_at].strip()


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
