"""Long conversations and long calls: their CPU time grows with their length, not with its square."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.openai.fields.parsing import parse_request
from rayloom_engine.front.openai.fields.wire import ChatRequest
from rayloom_engine.front.openai.prompts import chat_prompt
from rayloom_engine.text.message_parsing.calls.python_call import _EndFinder
from rayloom_engine.text.message_parsing.sink import CallRules, PartSink
from rayloom_engine.text.message_parsing.tool_formats import HERMES
from rayloom_engine.text.message_parts import Content
from rayloom_engine.text.tools.written import written_messages
from rt_front import running_front
from rt_tools import WEATHER


def _written(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return written_messages(messages, (), HERMES, has_system=True)


def _sink() -> PartSink:
    return PartSink(CallRules(schemas={}, call_id=str))


def test_twenty_thousand_responses_of_tools_are_one_message() -> None:
    started = time.process_time()
    [message] = _written([{"role": "tool", "content": "x" * 450}] * 20_000)
    assert time.process_time() - started < 0.5
    response = "<tool_response>\n" + "x" * 450 + "\n</tool_response>"
    assert message == {"role": "user", "content": "\n".join([response] * 20_000)}


def test_a_clients_own_key_does_not_make_a_message_a_response() -> None:
    own = {"role": "user", "content": "Hi", "is_response": True}
    tool = {"role": "tool", "content": "rain"}
    response = {"role": "user", "content": "<tool_response>\nrain\n</tool_response>"}
    assert _written([own, tool, own]) == [own, response, own]


@pytest.mark.parametrize("quote", ["'", '"'])
def test_the_end_of_a_python_call_is_found_in_one_pass(quote: str) -> None:
    inside = "a)\\" + quote + "\\\\ "  # an escaped quote and an escaped backslash
    text = f"a={quote}{inside * 17_000}{quote}, b=[1])"
    assert len(text) > 100_000
    finder = _EndFinder(0)
    started = time.process_time()
    found = [finder.find(text[:end]) for end in range(4, len(text), 4)]
    assert not any(found)
    assert finder.find(text + "tail")
    assert finder.at == len(text)
    assert time.process_time() - started < 5


def test_blanks_that_are_held_back_are_looked_at_once() -> None:
    sink = _sink()
    sink.content("a")
    started = time.process_time()
    for _ in range(100_000):
        sink.content(" \n")
    assert time.process_time() - started < 1
    sink.content("b ")
    sink.end()
    assert sink.take() == [Content("a"), Content(" \n" * 100_000 + "b"), Content(" ")]


def test_blanks_before_a_call_are_dropped() -> None:
    sink = _sink()
    sink.content("a \n")
    sink.content("\n")
    sink.drop_blanks()
    sink.end()
    assert sink.take() == [Content("a")]


def test_a_long_conversation_is_written_in_a_thread(tmp_path: Path) -> None:
    messages = [{"role": "tool", "content": "x", "tool_call_id": "a"}] * 20_000
    request = parse_request(ChatRequest, {"messages": messages, "tools": [WEATHER]})

    async def ask(text: ModelText) -> tuple[str, float]:
        started = time.thread_time()
        prompt = await chat_prompt(text, request.messages, request)
        return prompt.text, time.thread_time() - started

    with running_front(tmp_path) as front:
        text = front.do(lambda: front.service.text)
    roomy = replace(text, model=msgspec.structs.replace(text.model, max_model_len=1_000_000))
    prompt, cpu_s = asyncio.run(ask(roomy))
    assert prompt.count("<tool_response>") == 20_000
    assert cpu_s < 0.03  # CPU time of the event loop's thread
