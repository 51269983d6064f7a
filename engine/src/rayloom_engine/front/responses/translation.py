"""Translates a Responses request into a chat request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.front.openai.chat.translated import TranslatedChat
from rayloom_engine.front.responses.input_items import conversation
from rayloom_engine.front.responses.request import LOGPROBS, ResponsesRequest

_NAMES = (
    (r"^messages$", "input"),
    (r"\bresponse_format(\.json_schema)?", "text.format"),
    (r"\btool_choice\.function\.name", "tool_choice.name"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"\.function(?=[.\[]|$)", ""),
    (r"\bmax_tokens\b", "max_output_tokens"),
)
# Fields that chats have under the same name.
_SAME = ("temperature", "top_p", "top_k", "stop", "stream", "parallel_tool_calls")


def translate(request: ResponsesRequest) -> TranslatedChat:
    """Returns the chat request that generates the answer. Raises RequestError that names the field."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only for streams; set stream to true or leave it out", "stream_options")
    talk = conversation(request.instructions, request.input)
    document = {**request.given(*_SAME), "messages": talk.messages}
    tools = [chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or [])]
    choice, allowed = _tool_choice(request.tool_choice)
    if allowed is not None:
        tools = _only(tools, allowed)
    if tools:
        document["tools"] = tools
    if choice is not None:
        document["tool_choice"] = choice
    if request.max_output_tokens is not None:
        document["max_tokens"] = request.max_output_tokens
    if request.reasoning is not None and request.reasoning.effort is not None:
        document["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        form = response_format(request.text.format)
        if form is not None:
            document["response_format"] = form
    if LOGPROBS in (request.include or ()):
        document["logprobs"] = True
        document["top_logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise RequestError(
            f'top_logprobs needs "{LOGPROBS}" in include; add it or leave top_logprobs out', "top_logprobs"
        )
    return TranslatedChat(document=document, sources=tuple(talk.sources), names=_NAMES)


def chat_tool(tool: object, where: str) -> dict[str, Any]:
    """Returns a function as chats describe it. Raises RequestError for any other kind of tool."""
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object, given {shown(tool)}", where)
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(
            f'{where}.type {shown(kind)} is not supported by this server; the only type is "function"', f"{where}.type"
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def response_format(form: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the chat's `response_format` for `text.format`; None for plain text. Raises RequestError."""
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    raise RequestError(
        f'text.format.type must be "text", "json_object" or "json_schema", given {shown(kind)}', "text.format.type"
    )


def _tool_choice(choice: object) -> tuple[object, list[str] | None]:
    """Returns the chat's `tool_choice` and the names of the allowed tools (None: all tools are allowed)."""
    if choice in (None, "auto", "none", "required"):
        return choice, None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if isinstance(choice, Mapping) and kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}, None
    if isinstance(choice, Mapping) and kind == "allowed_tools":
        return _allowed(choice)
    raise RequestError(
        'tool_choice must be "auto", "none", "required" or an object of the type "function" or "allowed_tools", given '
        f"{shown(choice)}",
        "tool_choice",
    )


def _allowed(choice: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Returns the mode and the names of the tools in an object of the type allowed_tools."""
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f'tool_choice.mode must be "auto" or "required", given {shown(mode)}', "tool_choice.mode")
    if not isinstance(tools, list) or not tools:
        raise RequestError(
            f"tool_choice.tools must be a list with at least one tool, given {shown(tools)}", "tool_choice.tools"
        )
    names = []
    for index, tool in enumerate(tools):
        name = tool.get("name") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(name, str):
            where = f"tool_choice.tools[{index}]"
            raise RequestError(f'{where} must be {{"type": "function", "name": NAME}}, given {shown(tool)}', where)
        names.append(name)
    return mode, names


def _only(tools: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    known = [tool["function"].get("name") for tool in tools]
    for name in names:
        if name not in known:
            raise RequestError(
                f"tool_choice.tools names {shown(name)}, which is not in tools; add it to tools", "tool_choice.tools"
            )
    return [tool for tool in tools if tool["function"].get("name") in names]
