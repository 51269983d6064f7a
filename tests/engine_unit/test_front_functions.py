"""`functions` and `function_call`, OpenAI's older form of tools, over HTTP against a fake core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rt_front import FrontUnderTest, running_front
from rt_tools import CALL, STOP, STOP_CALL, TEMPLATE, WEATHER, message, prompt, roomy, says, use_template

FUNCTIONS = [WEATHER["function"], STOP["function"]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> Iterator[FrontUnderTest]:
    with roomy(running) as front:
        use_template(front, TEMPLATE)
        yield front


def test_the_call_has_the_older_form_and_is_the_only_one(front: FrontUnderTest) -> None:
    says(front, f"I look.\n{CALL}\n{STOP_CALL}")
    assert message(front, functions=FUNCTIONS) == {
        "content": "I look.",
        "function_call": {"name": "weather", "arguments": '{"city": "Paris"}'},
        "finish_reason": "function_call",
    }


def test_a_stream_adds_up_to_the_same_call(front: FrontUnderTest) -> None:
    says(front, CALL)
    name = arguments = ""
    reasons = []
    with front.chat_stream(functions=FUNCTIONS) as chunks:
        for chunk in chunks:
            for choice in chunk["choices"] if isinstance(chunk, dict) else ():
                call = choice["delta"].get("function_call", {})
                name += call.get("name", "")
                arguments += call.get("arguments", "")
                reasons.append(choice["finish_reason"])
                assert "tool_calls" not in choice["delta"]
    assert (name, arguments, reasons[-1]) == ("weather", '{"city": "Paris"}', "function_call")


def test_the_prompt_is_that_of_the_same_tools(front: FrontUnderTest) -> None:
    says(front, "ok")
    front.chat(functions=FUNCTIONS)
    older = prompt(front)
    front.chat(tools=[{"type": "function", "function": function} for function in FUNCTIONS])
    assert prompt(front) == older
    front.chat(functions=FUNCTIONS, function_call="none")
    assert "weather" not in prompt(front)


def test_a_named_function_is_forced(front: FrontUnderTest) -> None:
    says(front, STOP_CALL)
    found = message(front, functions=FUNCTIONS, function_call={"name": "stop"})
    assert (found["function_call"], found["finish_reason"]) == ({"name": "stop", "arguments": "{}"}, "stop")
    grammar = front.do(lambda: front.core.submits[-1]).params.grammar
    assert "stop" in grammar and "weather" not in grammar


def test_a_text_stays_a_text(front: FrontUnderTest) -> None:
    says(front, "No.")
    assert message(front, functions=FUNCTIONS) == {"content": "No.", "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"functions": [5]}, "functions[0]", "functions[0] must be an object"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name", "functions[0].name must be 1 to 64 letters"),
        ({"functions": [{"name": "f"}] * 2}, "functions[1].name", "the name of two functions"),
        ({"functions": "x"}, "functions", "functions must be a list"),
        ({"function_call": "auto"}, "function_call", 'function_call "auto" needs functions'),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call", '{"name": NAME}, given "required"'),
        ({"functions": FUNCTIONS, "function_call": {"name": "g"}}, "function_call", "use one of weather, stop"),
        ({"functions": FUNCTIONS, "tools": [WEATHER]}, "functions", "give one pair"),
        ({"functions": FUNCTIONS, "tool_choice": "auto"}, "functions", "give one pair"),
    ],
)
def test_refusals_use_the_older_names(front: FrontUnderTest, fields: dict[str, Any], param: str, words: str) -> None:
    response = front.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert "tool" not in error["message"] or "pair" in words


def test_values_that_ask_for_nothing_change_nothing(front: FrontUnderTest) -> None:
    says(front, "ok")
    for fields in ({"functions": []}, {"function_call": "none"}, {"functions": [], "tools": [WEATHER]}):
        assert message(front, **fields)["content"] == "ok"
