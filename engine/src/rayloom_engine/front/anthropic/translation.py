"""Translates a Messages request into a chat request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.front.anthropic.message_blocks import chat_history
from rayloom_engine.front.anthropic.request import (
    MIN_THINKING_TOKENS,
    CountTokensRequest,
    MessagesRequest,
    PromptFields,
    ThinkingOptions,
    ToolChoice,
)
from rayloom_engine.front.openai.chat.translated import TranslatedChat

_NAMES = (
    (r"\bresponse_format(\.json_schema)?", "output_config.format"),
    (r"\btool_choice\.function\.name", "tool_choice.name"),
    (r"^reasoning_effort$", "output_config.effort"),
    (r"^thinking_token_budget$", "thinking.budget_tokens"),
    (r"^continue_final_message$", "messages"),
    (r"^parallel_tool_calls$", "tool_choice.disable_parallel_tool_use"),
    (r"^stop$", "stop_sequences"),
    (r"\.function\.parameters", ".input_schema"),
    (r"\.function(?=[.\[]|$)", ""),
)


def translate(request: MessagesRequest) -> TranslatedChat:
    """Returns the chat request that generates the answer. Raises RequestError that names the field."""
    given = request.given("max_tokens", "temperature", "top_p", "top_k", "stream")
    if request.stop_sequences:
        given["stop"] = request.stop_sequences
    _check_budget(request.thinking, request.max_tokens)
    return _translated(request, given)


def translate_prompt(request: CountTokensRequest) -> TranslatedChat:
    """Returns a chat request with the prompt that `translate` makes of the same fields."""
    given = {} if request.chat_template_kwargs is None else {"chat_template_kwargs": request.chat_template_kwargs}
    _check_budget(request.thinking, None)
    return _translated(request, given)


def _translated(request: PromptFields, given: dict[str, Any]) -> TranslatedChat:
    history = chat_history(request.system, request.messages)
    if len(history.messages) > 1 and _is_empty_answer(history.messages[-1]):
        # In Anthropic's API the last message of the assistant may be empty: the answer then begins a new message.
        history.messages.pop()
        history.sources.pop()
    document = {**given, "messages": history.messages}
    last = history.messages[-1]
    if last["role"] == "assistant":
        if last.get("tool_calls"):
            raise RequestError(
                "the last message has a tool_use block; send its result in a tool_result block", history.sources[-1]
            )
        document["continue_final_message"] = True
        document["add_generation_prompt"] = False
    if request.tools:
        document["tools"] = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        if request.tool_choice.type in ("any", "tool") and not request.tools:
            raise RequestError(
                f"tool_choice {shown(request.tool_choice.type)} needs tools; add tools, or leave tool_choice out",
                "tool_choice",
            )
        document.update(_tool_choice(request.tool_choice))
    if request.output_config is not None:
        if request.output_config.effort is not None:
            document["reasoning_effort"] = request.output_config.effort
        if request.output_config.format is not None:
            document["response_format"] = _response_format(request.output_config.format)
    if request.thinking is not None:
        _add_thinking(document, request.thinking)
    return TranslatedChat(document=document, sources=tuple(history.sources), names=_NAMES)


def _is_empty_answer(message: Mapping[str, Any]) -> bool:
    if message["role"] != "assistant" or message.get("tool_calls") or message.get("reasoning_content"):
        return False
    return not (message["content"] or "").strip()


def _chat_tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object, given {shown(tool)}", where)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise RequestError(
            f"{where}.type {shown(kind)} runs in Anthropic's server; this server takes only tools that the client "
            'runs: leave the type out or set it to "custom"',
            f"{where}.type",
        )
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"{where}.input_schema must be an object, the JSON schema of the tool's input, given {shown(schema)}",
            f"{where}.input_schema",
        )
    return {"type": "function", "function": {**function, "parameters": schema}}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name is missing; name the tool to call", "tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = "required" if choice.type == "any" else choice.type
    return fields


def _response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    kind = form.get("type")
    if kind != "json_schema":
        raise RequestError(
            f'output_config.format.type must be "json_schema", given {shown(kind)}', "output_config.format.type"
        )
    schema = form.get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"output_config.format.schema must be an object, given {shown(schema)}", "output_config.format.schema"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _check_budget(thinking: ThinkingOptions | None, max_tokens: int | None) -> None:
    if thinking is None or thinking.type != "enabled":
        return
    budget = thinking.budget_tokens
    if budget is None:
        raise RequestError('thinking.budget_tokens is missing; "enabled" needs it', "thinking.budget_tokens")
    if budget < MIN_THINKING_TOKENS or (max_tokens is not None and budget >= max_tokens):
        raise RequestError(
            f"thinking.budget_tokens must be at least {MIN_THINKING_TOKENS} and less than max_tokens, given {budget}",
            "thinking.budget_tokens",
        )


def _add_thinking(document: dict[str, Any], thinking: ThinkingOptions) -> None:
    """Adds the chat fields for `thinking`. "disabled" replaces the reasoning effort. "adaptive" adds no field."""
    if thinking.type == "disabled":
        document["reasoning_effort"] = "none"
    elif thinking.type == "enabled":
        document["thinking_token_budget"] = thinking.budget_tokens
        document["chat_template_kwargs"] = {"enable_thinking": True, **document.get("chat_template_kwargs", {})}
