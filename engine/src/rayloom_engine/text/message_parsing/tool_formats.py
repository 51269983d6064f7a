"""Tool formats: how families of models write tool calls, as a table.

The text of a message with calls:

  content  opener  [  call  separator  call  ]  closer  content

The characters [ and ] occur in formats that put the calls into a list. Blanks between these elements mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

CallSyntax = Literal["object", "xml", "python", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The tags of a format, and the syntax of a single call in it."""

    name: str
    syntax: CallSyntax
    openers: tuple[str, ...] = ()  # tags before one or several calls, anywhere in the content
    bare_openers: tuple[str, ...] = ()  # like `openers`, but such a text is also the beginning of the call itself
    first_openers: tuple[str, ...] = ()  # beginnings of a call that count only where the content begins
    closers: tuple[str, ...] = ()  # tags after the calls, which a model may leave out
    separators: tuple[str, ...] = ()  # texts between two calls that share an opener and are not in a list
    is_list: bool = False  # the calls may be in a list: between [ and ], with commas
    needs_known_name: bool = False  # no tag marks a call, so a call must name a function of the request
    short_ids: bool = False  # ids of calls are 9 letters and digits
    arguments_key: str = "arguments"  # key of the arguments in an object, as the model writes it
    parts: tuple[str, ...] = ()  # tags inside a call, and the tags of which an opener is composed
    example: str = ""  # example of a call for a model whose template cannot describe tools

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags: texts that are never content."""
        return (*self.openers, *self.bare_openers, *self.closers)


_OBJECT = '{"name": "FUNCTION", "arguments": {"PARAMETER": "VALUE"}}'

HERMES = ToolFormat(
    name="hermes",
    syntax="object",
    openers=("<tool_call>",),
    closers=("</tool_call>",),
    example=f"<tool_call>\n{_OBJECT}\n</tool_call>",
)
QWEN3_XML = ToolFormat(
    name="qwen3_xml",
    syntax="xml",
    openers=("<tool_call>",),
    bare_openers=("<function=",),
    closers=("</tool_call>",),
    example="<tool_call>\n<function=FUNCTION>\n<parameter=PARAMETER>\nVALUE\n</parameter>\n</function>\n</tool_call>",
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    syntax="object",
    openers=("<|python_tag|>",),
    first_openers=("{",),
    separators=(";",),
    needs_known_name=True,
    arguments_key="parameters",
    example=_OBJECT.replace("arguments", "parameters"),
)
PYTHONIC = ToolFormat(
    name="pythonic",
    syntax="python",
    openers=("<|python_start|>",),
    first_openers=("[",),
    closers=("<|python_end|>",),
    is_list=True,
    needs_known_name=True,
    example='[FUNCTION(PARAMETER="VALUE")]',
)
MISTRAL = ToolFormat(
    name="mistral",
    syntax="named",
    openers=("[TOOL_CALLS]",),
    is_list=True,
    short_ids=True,
    parts=("[ARGS]", "[CALL_ID]"),
    example=f"[TOOL_CALLS][{_OBJECT}]",
)
GRANITE = ToolFormat(
    name="granite",
    syntax="object",
    openers=("<|tool_call|>", "<tool_call>"),
    is_list=True,
    example=f"<|tool_call|>[{_OBJECT}]",
)
INTERNLM = ToolFormat(
    name="internlm",
    syntax="object",
    openers=("<|action_start|><|plugin|>",),
    closers=("<|action_end|>",),
    arguments_key="parameters",
    parts=("<|action_start|>", "<|plugin|>"),
    example=f"<|action_start|><|plugin|>\n{_OBJECT.replace('arguments', 'parameters')}\n<|action_end|>",
)
# A message begins with a header that names its recipient; `channels.py` has the tags.
HARMONY = ToolFormat(name="harmony", syntax="named")

TOOL_FORMATS = MappingProxyType(
    {format.name: format for format in (HERMES, QWEN3_XML, LLAMA3_JSON, PYTHONIC, MISTRAL, GRANITE, INTERNLM, HARMONY)}
)
