"""An assistant's message in the chat endpoint's JSON: whole, and as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rayloom_engine.text.message_parsing.message import Message
from rayloom_engine.text.message_parts import Content, MessagePart, Reasoning, ToolCallArguments, ToolCallStart


def message_document(message: Message, *, is_older: bool = False) -> dict[str, Any]:
    """Returns a whole message. The keys of reasoning and tool calls are there only if the message has them.

    `is_older`: the message's only call is written in OpenAI's older form, `function_call`.
    """
    document: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        # vLLM's clients read either of the two names.
        document["reasoning"] = message.reasoning
        document["reasoning_content"] = message.reasoning
    if message.tool_calls:
        document["content"] = message.content or None
    if message.tool_calls and is_older:
        call = message.tool_calls[0]
        document["function_call"] = {"name": call.name, "arguments": call.arguments}
    elif message.tool_calls:
        document["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return document


def message_deltas(parts: Iterable[MessagePart], *, is_older: bool = False) -> list[dict[str, Any]]:
    """Returns a delta for each part. A tool call has its id, type and name in its first delta alone.

    `is_older`: as in `message_document`.
    """
    return [_delta(part, is_older) for part in parts]


def _delta(part: MessagePart, is_older: bool) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning": part.text, "reasoning_content": part.text}
    if isinstance(part, ToolCallStart):
        function = {"name": part.name, "arguments": ""}
        if is_older:
            return {"function_call": function}
        return {"tool_calls": [{"index": part.index, "id": part.call_id, "type": "function", "function": function}]}
    assert isinstance(part, ToolCallArguments)
    if is_older:
        return {"function_call": {"arguments": part.text}}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
