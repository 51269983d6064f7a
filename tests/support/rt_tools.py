"""Tools, texts and templates for tests of chats with tools or reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from rayloom_engine.text.chat_template import ChatTemplate
from rayloom_engine.text.model_formats import model_formats
from rt_fake_core import say
from rt_front import FrontUnderTest

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
STOP_CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
# A template like Qwen3's: it describes tools, and does not open the reasoning.
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
    "[assistant]{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPEN_TEMPLATE = TEMPLATE.replace("{% if enable", "<think>\n{% if enable")


@contextmanager
def roomy(front: FrontUnderTest) -> Iterator[FrontUnderTest]:
    """Gives the front a long context. At the end of the block, restores the front's model and template."""
    text = front.do(lambda: front.service.text)
    assert text is not None
    longer = replace(text, model=msgspec.structs.replace(text.model, max_model_len=16384))
    front.do(lambda: setattr(front.service, "text", longer))
    front.do(front.core.reset)
    yield front
    front.do(lambda: setattr(front.service, "text", text))


def use_template(front: FrontUnderTest, source: str) -> None:
    text = front.do(lambda: front.service.text)
    assert text is not None
    template = ChatTemplate(source, {})
    changed = replace(text, template=template, formats=model_formats(template, text.tokenizer))
    front.do(lambda: setattr(front.service, "text", changed))


def says(front: FrontUnderTest, text: str, tokens_per_output: int = 1) -> None:
    def prepare() -> None:
        front.core.script = say(text)
        front.core.tokens_per_output = tokens_per_output

    front.do(prepare)


def prompt(front: FrontUnderTest) -> str:
    """The prompt of the last request, without special tokens."""
    ids = front.do(lambda: front.core.submits[-1]).prompt_ids
    return bytes(each for each in ids if each < 256).decode()


def message(front: FrontUnderTest, **fields: Any) -> dict[str, Any]:
    """The message of a whole answer, with its finish reason; without the ids of its calls."""
    response = front.chat(**fields)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    found = {**choice["message"], "finish_reason": choice["finish_reason"]}
    if "tool_calls" in found:
        found["tool_calls"] = [
            (call["function"]["name"], call["function"]["arguments"]) for call in found["tool_calls"]
        ]
    return {key: value for key, value in found.items() if key not in ("role", "refusal")}
