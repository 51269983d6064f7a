"""Streams of endless tool calls, which a grammar forces. So a fault always happens within a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rt_server import Stream

# The JSON schema of a list that is longer than any answer.
ENDLESS_JSON = {
    "type": "array",
    "minItems": 1_000_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"people": ENDLESS_JSON},
            "required": ["people"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class CallStream(Stream):
    """One streamed chat whose answer is a tool call. Deltas are joined by OpenAI's rules."""

    endpoint: ClassVar[str] = "/v1/chat/completions"
    logprobs: ClassVar[object] = True

    names: list[str] = field(default_factory=list)  # names of the calls
    arguments: list[str] = field(default_factory=list)  # arguments of the calls, as text

    def take_choice(self, choice: dict[str, Any]) -> list[str]:
        delta = choice["delta"]
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            self._take_call(call)
        return [entry["token"] for entry in (choice.get("logprobs") or {}).get("content") or ()]

    def _take_call(self, call: dict[str, Any]) -> None:
        index, function = call["index"], call["function"]
        if index == len(self.names) and call.get("id") and call.get("type") == "function":
            self.names.append(function["name"])
            self.arguments.append("")
        elif index != len(self.names) - 1 or call.get("id") or function.get("name"):
            self.failure = f"a delta that begins no call and continues none: {call}"
            return
        self.arguments[index] += function["arguments"]

    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each call so far."""
        return list(zip(self.names, self.arguments, strict=True))


def call_body(prompt: str, max_tokens: int) -> dict[str, object]:
    """The body of a chat whose answer is a call of TOOL. The token limit cuts the call off within its arguments."""
    return {
        "model": "m",
        "messages": [{"role": "user", "content": prompt}],
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": max_tokens,
    }
