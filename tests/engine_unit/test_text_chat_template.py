"""Chat templates: the embedded model's template is rendered as by transformers, and hostile templates do no harm."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.errors import ModelError, RequestError
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.text.chat_template import ChatTemplate
from rayloom_engine.text.tokenizer import Tokenizer
from rt_byte_model import byte_model

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_the_embedded_models_template_adds_its_system_line() -> None:
    folder = resolve("builtin://smollm2-135m", None).path
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer.special_tokens)
    assert template is not None
    assert template.render(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_are_trimmed_and_names_are_there() -> None:
    source = (
        "{{ bos_token }}\n{% for m in messages %}\n  {% if loop.first %}\n"
        "{{ m.role }}:{{ m.content }}\n  {% endif %}\n{% endfor %}"
    )
    assert render(source) == "<s>\nuser:Hi\n"


def test_loop_controls_json_and_generation_blocks_work() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{% generation %}x{{ messages[0].content }}{% endgeneration %}") == "xHi"


def test_the_date_comes_from_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, clock=lambda: datetime.datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"


def test_extra_names_reach_the_template() -> None:
    assert render("{{ enable_thinking }}{{ tools is none }}", extra={"enable_thinking": False}) == "FalseTrue"


def test_a_refusal_of_the_template_is_the_users_to_see() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages"


@pytest.mark.parametrize("content", ["<", "e", "|", "<|im_end|>", "assistant", " <\n"])
@pytest.mark.parametrize("filter", ["", " | trim"])
def test_a_final_message_ends_at_its_own_text_even_if_the_template_writes_the_same_text_behind_it(
    content: str, filter: str
) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content" + filter + " }}<|im_end|>\n{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": content}]
    before = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    prompt = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == before + (content.strip() if filter else content)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ m.content }}{{ raise_exception('too long') if m.content | length > 9 }}", "Well"),
        ("{{ m.content[:9] }}", "Well"),
        ("{{ m.content | upper if m.content | length > 9 else m.content }}", "Well"),
        ("{{ m.content }}. Again: {{ m.content }}", "Well. Again: Well"),
    ],
)
def test_a_template_that_treats_messages_in_its_own_way_does_not_hinder_a_continuation(
    written: str, expected: str
) -> None:
    source = "{% for m in messages %}<{{ m.role }}>" + written + "</>{% endfor %}"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, [{"role": "assistant", "content": "Well"}], **options) == f"<assistant>{expected}"


def test_the_final_message_can_be_continued() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, messages, **options) == "<user>Hi</><assistant>Well,"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 100000000 }}",
        "{{ 9 ** 999999999 }}",
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[5].content + 1 }}",
        "{{ 1 / 0 }}",
    ],
    ids=["python", "change", "loops", "repeat", "power", "product", "length", "recursion", "index", "division"],
)
def test_a_harmful_template_ends_in_a_refusal(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        render(source)


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})


def test_broken_files_are_the_models_fault(tmp_path: Path) -> None:
    settings = tmp_path / "tokenizer_config.json"
    for broken in ([{"template": "T"}], ["T"], 5):
        settings.write_text(json.dumps({"chat_template": broken}))
        with pytest.raises(ModelError, match="chat_template"):
            ChatTemplate.load(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="UTF-8"):
        ChatTemplate.load(tmp_path, {})
    folder = byte_model(tmp_path / "model")
    for odd in ({"id": 3}, 7, ["</s>"]):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": odd}))
        with pytest.raises(ModelError, match="eos_token"):
            Tokenizer.load(folder)


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, {}) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path, {})
    assert template is not None
    assert template.render(USER) == "D"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.load(tmp_path, {})
    assert template is not None
    assert template.render(USER) == "file"
