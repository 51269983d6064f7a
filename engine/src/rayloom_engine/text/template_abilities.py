"""TemplateAbilities: the features of a chat template, found by rendering small conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayloom_engine.errors import RequestError
from rayloom_engine.text.chat_template import ChatTemplate

_PROBE = "rayloom_probe"
_USER = {"role": "user", "content": "Hi"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_CALL = {"id": "abcdef123", "type": "function", "function": {"name": _PROBE, "arguments": '{"probe_key": "x"}'}}
_CALLED = (
    _USER,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdef123", "name": _PROBE, "content": "5"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateAbilities:
    """The abilities of a template. A template that describes tools is expected to render calls and results, too."""

    has_tools: bool = True  # the prompt describes the request's tools
    has_system: bool = True  # the prompt has the text of a system message
    takes_text_arguments: bool = False  # the arguments of calls must be JSON text instead of objects


def template_abilities(template: ChatTemplate) -> TemplateAbilities:
    """Returns the abilities of `template`."""
    system = _rendered(template, ({"role": "system", "content": _PROBE}, _USER))
    with_tools = _rendered(template, (_USER,), tools=(_TOOL,))
    calls = _rendered(template, _CALLED, tools=(_TOOL,))
    is_wrong = calls is None or "{'probe_key'" in calls
    calls_with_text = _rendered(template, _CALLED, tools=(_TOOL,), text_arguments=True) if is_wrong else None
    return TemplateAbilities(
        has_tools=with_tools is not None and _PROBE in with_tools,
        has_system=system is not None and _PROBE in system,
        takes_text_arguments=calls_with_text is not None and "probe_key" in calls_with_text,
    )


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    text_arguments: bool = False,
) -> str | None:
    try:
        return template.render(messages, tools=tools, text_arguments=text_arguments)
    except RequestError:
        return None
