"""Prompts: messages and ids of a request to token ids that the core can take."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from rayloom_engine.errors import RequestError
from rayloom_engine.front.service import ENCODE_IN_THREAD_ABOVE_CHARS, ModelText
from rayloom_engine.text.chat_template import MAX_CPU_S
from rayloom_engine.text.template_sandbox import TemplateTooSlow

CPU_S_IN_LOOP = 0.05  # so long may a template hold up the streams, once


class TemplateOptions(Protocol):
    """The fields of a request that decide how its messages are written."""

    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


async def chat_prompt(text: ModelText, messages: list[Any], options: TemplateOptions) -> list[int]:
    """Token ids of a conversation. Raises RequestError when the model or its template cannot take it."""
    template = text.template
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions with a prompt", "messages")

    def render(cpu_s: float) -> str:
        return template.render(
            messages,
            add_generation_prompt=options.add_generation_prompt is not False,
            continue_final_message=bool(options.continue_final_message),
            extra=options.chat_template_kwargs,
            cpu_s=cpu_s,
        )

    is_long = len(messages) > 64 or sum(map(_num_chars, messages)) > ENCODE_IN_THREAD_ABOVE_CHARS
    prompt = None
    if not is_long and not template.is_slow:
        try:
            prompt = render(CPU_S_IN_LOOP)
        except TemplateTooSlow:
            template.is_slow = True
    if prompt is None:
        prompt = await asyncio.to_thread(render, MAX_CPU_S)
    # Templates write the special tokens themselves, so none are added unless asked for.
    return await text.encode(prompt, add_special_tokens=bool(options.add_special_tokens))


def _num_chars(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return len(content) if isinstance(content, str) else ENCODE_IN_THREAD_ABOVE_CHARS
