"""ModelFormats: how a model writes reasoning and tool calls, found from its chat template."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayloom_engine.text.chat_template import ChatTemplate
from rayloom_engine.text.message_parsing.channels import TAGS
from rayloom_engine.text.message_parsing.reasoning_formats import QWEN3, REASONING_FORMATS, ReasoningFormat
from rayloom_engine.text.message_parsing.tool_formats import (
    GRANITE,
    HARMONY,
    HERMES,
    INTERNLM,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    QWEN3_XML,
    TOOL_FORMATS,
    ToolFormat,
)
from rayloom_engine.text.template_abilities import TemplateAbilities, template_abilities
from rayloom_engine.text.tokenizer import Tokenizer

# Formats, and the texts that mark a template of each format. The first row whose texts all occur in a template is used.
_TOOL_MARKS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    (GRANITE, ("<|start_of_role|>", "<|tool_call|>")),
    (INTERNLM, ("<|action_start|>", "<|plugin|>")),
    (QWEN3_XML, ("<tool_call>", "<function=", "<parameter=")),
    (HERMES, ("<tool_call>", "tojson")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (PYTHONIC, ("<|python_start|>",)),
    (PYTHONIC, ("func_name1(",)),
    (LLAMA3_JSON, ("<|python_tag|>",)),
    (LLAMA3_JSON, ('"parameters": dictionary of argument name',)),
)
_OTHER_FORMATS = ("<arg_key>",)  # tags of unsupported formats that share tags with the formats above
_REASONING_MARKS = (("[THINK]", "mistral"), ("<seed:think>", "seed_oss"), ("</think>", QWEN3.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """The formats of one model."""

    tools: ToolFormat = HERMES
    reasoning: ReasoningFormat | None = None
    # True if tools and calls are written into messages, because the template cannot describe them
    writes_tools: bool = True
    abilities: TemplateAbilities = field(default_factory=TemplateAbilities)
    special_ids: dict[str, int] = field(default_factory=dict)  # tag -> id, for tags that are special tokens

    @property
    def is_harmony(self) -> bool:
        return self.tools is HARMONY


def model_formats(
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ModelFormats:
    """Returns the formats of a model. The settings `tool_parser` and `reasoning_parser` override the template.

    If the template has no tools, or an unknown format, tools are written into the messages, in the format of Hermes.
    """
    source = template.source if template is not None else ""
    abilities = template_abilities(template) if template is not None else TemplateAbilities(has_tools=False)
    found = _tool_format(source)
    tools = TOOL_FORMATS[tool_parser] if tool_parser is not None else found or HERMES
    has_own = abilities.has_tools and (found is not None or tool_parser is not None)
    reasoning = _reasoning_format(source, reasoning_parser) if tools is not HARMONY else None
    tags = TAGS if tools is HARMONY else (*tools.tags, *tools.parts)
    if reasoning is not None:
        tags = (*tags, reasoning.start, reasoning.end)
    return ModelFormats(
        tools=tools,
        reasoning=reasoning,
        writes_tools=not has_own and tools is not HARMONY,
        abilities=abilities,
        special_ids=_special_ids(tokenizer, tags),
    )


def _tool_format(source: str) -> ToolFormat | None:
    if any(mark in source for mark in _OTHER_FORMATS):
        return None
    return next((format for format, marks in _TOOL_MARKS if all(mark in source for mark in marks)), None)


def _reasoning_format(source: str, name: str | None) -> ReasoningFormat | None:
    if name is not None:
        return REASONING_FORMATS.get(name)  # "none" is no format
    return next((REASONING_FORMATS[name] for mark, name in _REASONING_MARKS if mark in source), None)


def _special_ids(tokenizer: Tokenizer, tags: tuple[str, ...]) -> dict[str, int]:
    ids = {tag: tokenizer.backend.token_to_id(tag) for tag in tags}
    return {tag: token_id for tag, token_id in ids.items() if token_id is not None and tokenizer.is_special(token_id)}
