"""Prompts: turns a request's messages, texts or ids into token ids for the core."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.front.model_text import ENCODE_IN_THREAD_ABOVE_CHARS, ModelText
from rayloom_engine.front.openai.fields.field_types import whole_items
from rayloom_engine.sampling_params import check_token_ids
from rayloom_engine.text.chat_template import MAX_CPU_S
from rayloom_engine.text.messages import plain_messages
from rayloom_engine.text.template_sandbox import TemplateTooSlow
from rayloom_engine.text.tools.tool import ToolUse
from rayloom_engine.text.tools.written import written_messages

# Decoding fewer token ids takes less time than the change to a thread. Decoding a million token ids takes 0.1 s.
DECODE_IN_THREAD_ABOVE_TOKENS = 1024
# seconds of CPU time after which a rendering on the event loop is stopped and repeated in a thread
CPU_S_IN_LOOP = 0.05


class TemplateOptions(Protocol):
    """The request fields that decide how the chat template is rendered."""

    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None

    def template_names(self) -> dict[str, Any]:
        """Returns further variables for the template."""

    def tool_use(self) -> ToolUse:
        """Returns the tools of the request."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    text: str
    ids: list[int]


async def chat_prompt(text: ModelText, messages: list[Any], options: TemplateOptions) -> ChatPrompt:
    """Returns the prompt of a conversation.

    Raises RequestError if the model has no template, or if the template refuses the messages.
    """
    template = text.template
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions with a prompt", "messages")

    formats = text.formats
    tools = options.tool_use().shown
    is_written = formats.writes_tools and (bool(tools) or any(map(_has_calls, messages)))

    def render(cpu_s: float) -> str:
        shown = messages
        if is_written:
            shown = written_messages(
                plain_messages(messages), tools, formats.tools, has_system=formats.abilities.has_system
            )
        return template.render(
            shown,
            tools=() if is_written else tools,
            text_arguments=formats.abilities.takes_text_arguments,
            add_generation_prompt=options.add_generation_prompt is not False,
            continue_final_message=bool(options.continue_final_message),
            extra=options.template_names(),
            cpu_s=cpu_s,
        )

    is_long = len(messages) > 64 or sum(map(_num_chars, messages)) > ENCODE_IN_THREAD_ABOVE_CHARS
    prompt = None
    if not is_long and template.is_slow:
        template.was_rendered_apart()
    elif not is_long:
        try:
            prompt = render(CPU_S_IN_LOOP)
        except TemplateTooSlow:
            template.was_slow()
    if prompt is None:
        prompt = await asyncio.to_thread(render, MAX_CPU_S)
    # Templates write the special tokens themselves, so the tokenizer adds none unless the request asks for it.
    return ChatPrompt(prompt, await text.encode(prompt, add_special_tokens=bool(options.add_special_tokens)))


def parse_prompts(prompt: object) -> list[str | tuple[int, ...]]:
    """Returns the prompts in the field `prompt` of a completion; None means a single empty text.

    Raises RequestError.
    """
    if prompt is None:
        return [""]
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        ids = whole_items(prompt)
        assert isinstance(ids, list)
        if all(type(item) is int for item in ids):
            return [tuple(ids)]
        lists = [whole_items(item) for item in prompt]
        if all(isinstance(item, list) and all(type(token_id) is int for token_id in item) for item in lists):
            return [tuple(item) for item in lists if isinstance(item, list)]
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
        "prompt",
    )


async def text_prompt(text: ModelText, prompt: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Returns the token ids of a text.

    For an empty text, returns the tokens that start a document, unless `add_special_tokens` is false.
    """
    ids = await text.encode(prompt, add_special_tokens=add_special_tokens)
    if not ids and not prompt and add_special_tokens:
        ids = text.tokenizer.document_start()
    return tuple(ids)


async def transferred_prompt(params: Mapping[str, Any] | None, text: ModelText) -> ChatPrompt | None:
    """Returns the prompt in a request's `kv_transfer_params`; None if they have no prompt.

    Raises RequestError for anything but a list of the model's token ids.
    """
    field = "kv_transfer_params.prompt_token_ids"
    ids = whole_items((params or {}).get("prompt_token_ids"))
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or any(type(token_id) is not int for token_id in ids):
        raise RequestError(f"{field} must be a list of token ids, and not empty, given {shown(ids)}", field)
    check_token_ids(ids, text.model.vocab_size, field)
    decode = functools.partial(text.tokenizer.decode, ids, skip_special_tokens=False)
    return ChatPrompt(decode() if len(ids) <= DECODE_IN_THREAD_ABOVE_TOKENS else await asyncio.to_thread(decode), ids)


def _has_calls(message: object) -> bool:
    return isinstance(message, dict) and bool(message.get("tool_calls") or message.get("function_call"))


def _num_chars(message: object) -> int:
    if not isinstance(message, dict) or _has_calls(message):
        return ENCODE_IN_THREAD_ABOVE_CHARS
    content = message.get("content")
    return len(content) if isinstance(content, str) else ENCODE_IN_THREAD_ABOVE_CHARS
