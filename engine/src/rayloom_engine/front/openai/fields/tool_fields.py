"""Checks the fields `tools`, `tool_choice` and `parallel_tool_calls` of a request. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.grammar.nullable_schemas import with_null
from rayloom_engine.text.tools.tool import Tool, ToolUse

MAX_TOOLS = 128  # OpenAI's limit
MAX_TOOL_BYTES = 256 * 1024  # bytes of all tools together
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MODES = ("none", "auto", "required")


def tool_use(tools: Sequence[Any] | None, tool_choice: object, parallel_tool_calls: bool | None) -> ToolUse:
    """Returns the tools of a request and how the model may use them. Raises RequestError that names the field."""
    parsed = _tools(tools or ())
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        tool_choice, parsed = _allowed(tool_choice, parsed)
    if tool_choice is None:
        tool_choice = "auto" if parsed else "none"
    if tool_choice == "none":
        return ToolUse(tools=parsed)
    if not parsed:
        raise RequestError(
            f'tool_choice {shown(tool_choice)} needs tools; add tools, or set tool_choice to "none"', "tool_choice"
        )
    is_parallel = parallel_tool_calls is not False
    if tool_choice == "auto":
        return ToolUse(tools=parsed, mode="auto", callable=parsed, is_parallel=is_parallel)
    if tool_choice == "required":
        return ToolUse(tools=parsed, mode="required", callable=parsed, is_parallel=is_parallel)
    name = _chosen_name(tool_choice)
    chosen = _by_name(parsed, name, "tool_choice.function.name")
    return ToolUse(tools=parsed, mode="named", callable=(chosen,), is_parallel=is_parallel)


def _by_name(tools: Sequence[Tool], name: object, where: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in tools[:5]) + (", ..." if len(tools) > 5 else "")
    use = f"use one of {names}" if names else "add it to tools"
    raise RequestError(f"{where} {shown(name)} is none of the tools; {use}", "tool_choice")


def _allowed(tool_choice: Mapping[str, Any], tools: tuple[Tool, ...]) -> tuple[str, tuple[Tool, ...]]:
    """Returns the mode and the tools of an object of the type allowed_tools. The prompt shows only these tools."""
    where = "tool_choice.allowed_tools"
    allowed = tool_choice.get("allowed_tools")
    if not isinstance(allowed, Mapping):
        raise RequestError(f"{where} must be an object with mode and tools, given {shown(allowed)}", where)
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise RequestError(f'{where}.mode must be "auto" or "required", given {shown(mode)}', f"{where}.mode")
    named = allowed.get("tools")
    if not isinstance(named, list) or not named:
        raise RequestError(f"{where}.tools must be a list with at least one tool, given {shown(named)}", where)
    chosen = {}
    for index, tool in enumerate(named[: MAX_TOOLS + 1]):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        chosen[str(name)] = _by_name(tools, name, f"{where}.tools[{index}].function.name")
    return str(mode), tuple(chosen.values())


def _chosen_name(tool_choice: object) -> object:
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": NAME}}, or '
            f"an object of the type allowed_tools, given {shown(tool_choice)}",
            "tool_choice",
        )
    return function.get("name")


def _tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} tools, at most {MAX_TOOLS} are allowed", "tools")
    num_left = MAX_TOOL_BYTES
    parsed: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        num_left -= len(msgspec.json.encode(tool))
        if num_left < 0:
            raise RequestError(
                f"tools has more than {MAX_TOOL_BYTES} bytes of JSON; shorten descriptions and schemas, or send fewer "
                "tools",
                "tools",
            )
        checked = _tool(tool, where)
        if checked.name in parsed:
            raise RequestError(
                f"{where}.function.name {shown(checked.name)} is the name of two tools; rename one",
                f"{where}.function.name",
            )
        parsed[checked.name] = checked
    return tuple(parsed.values())


def _tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        given = tool.get("type") if isinstance(tool, Mapping) else tool
        raise RequestError(
            f'{where}.type must be "function", the only kind of tool here, given {shown(given)}', f"{where}.type"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be an object, given {shown(function)}", f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise RequestError(
            f"{where}.function.name must be 1 to 64 letters a-z and A-Z, digits, - and _, given {shown(name)}",
            f"{where}.function.name",
        )
    description = function.get("description")
    if not isinstance(description, str | None):
        raise RequestError(
            f"{where}.function.description must be a string, given {shown(description)}",
            f"{where}.function.description",
        )
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(
            f"{where}.function.strict must be true or false, given {shown(strict)}", f"{where}.function.strict"
        )
    parameters = _parameters(function.get("parameters"), f"{where}.function.parameters")
    return Tool(name=name, parameters=parameters, is_strict=bool(strict), document=dict(tool))


def _parameters(parameters: object, where: str) -> Mapping[str, Any]:
    if parameters is None or parameters == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where} must be a JSON schema, an object, given {shown(parameters)}", where)
    kind = parameters.get("type", "object")
    if kind != "object":
        raise RequestError(
            f'{where}.type must be "object", because arguments have names, given {shown(kind)}', f"{where}.type"
        )
    # A call always has an object of arguments, so null is allowed for single arguments alone.
    return with_null({"type": "object", **parameters, "nullable": False})
