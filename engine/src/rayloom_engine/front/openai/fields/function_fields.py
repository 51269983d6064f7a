"""`functions` and `function_call`: OpenAI's older names of `tools` and `tool_choice`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.front.openai.fields.tool_fields import tool_use
from rayloom_engine.text.tools.tool import ToolUse

# Patterns of the newer fields' names, with the names that the client used.
_NAMES = (
    (r"\btools\[(\d+)\]\.function", r"functions[\1]"),
    (r"\btool_choice\.function\.name", "function_call.name"),
    (r"\btool_choice\b", "function_call"),
    (r"\btools\b", "functions"),
)


def function_use(functions: Sequence[Any] | None, function_call: object) -> ToolUse:
    """Returns the functions of a request as tools, of which the model calls at most one. Raises RequestError."""
    is_named = isinstance(function_call, Mapping) and set(function_call) == {"name"}
    if not is_named and function_call not in (None, "none", "auto"):
        raise RequestError(
            f'function_call must be "none", "auto" or {{"name": NAME}}, given {shown(function_call)}', "function_call"
        )
    tools = [{"type": "function", "function": function} for function in functions or ()]
    choice = {"type": "function", "function": function_call} if is_named else function_call
    try:
        return tool_use(tools, choice, False)
    except RequestError as error:
        raise RequestError(_renamed(str(error)), _renamed(error.field or "")) from error


def _renamed(text: str) -> str:
    for pattern, name in _NAMES:
        text = re.sub(pattern, name, text)
    return text
