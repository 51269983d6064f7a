"""Tools and reasoning over HTTP against a fake core: prompts, whole and streamed answers, refusals.

The formats are in test_message_parsing.py, the grammars in test_tool_grammars.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rayloom_engine.front.openai.fields.tool_fields import MAX_TOOLS, tool_use
from rt_front import FrontUnderTest, running_front, text_of
from rt_tools import CALL, OPEN_TEMPLATE, STOP, STOP_CALL, TEMPLATE, WEATHER, message, prompt, roomy, says, use_template


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> Iterator[FrontUnderTest]:
    """A front whose template cannot describe tools."""
    with roomy(running) as front:
        yield front


@pytest.fixture
def thinker(front: FrontUnderTest) -> FrontUnderTest:
    use_template(front, TEMPLATE)
    return front


def test_a_call_is_no_content(front: FrontUnderTest) -> None:
    says(front, f"I look.\n{CALL}\n{STOP_CALL}")
    choice = front.chat(tools=[WEATHER, STOP]).json()["choices"][0]
    ids = [call.pop("id") for call in choice["message"]["tool_calls"]]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {"type": "function", "function": {"name": "stop", "arguments": "{}"}},
        ],
    }
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") and len(each) == 29 for each in ids)


def test_a_message_of_calls_alone_has_no_content(front: FrontUnderTest) -> None:
    says(front, CALL)
    assert message(front, tools=[WEATHER])["content"] is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": "auto"}, "tool_calls"),
        ({"tool_choice": "required"}, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "stop"),
        ({"max_tokens": len(CALL) - 1}, "length"),
    ],
)
def test_finish_reasons(front: FrontUnderTest, fields: dict[str, Any], expected: str) -> None:
    says(front, CALL)
    found = message(front, tools=[WEATHER], **fields)
    assert found["finish_reason"] == expected
    assert found["tool_calls"] == [("weather", '{"city": "Paris"}')]


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_a_use_of_tools_everything_is_content(front: FrontUnderTest, fields: dict[str, Any]) -> None:
    says(front, CALL)
    assert message(front, **fields) == {"content": CALL, "finish_reason": "stop"}
    assert "weather" not in prompt(front)


def test_only_one_call_without_parallel_tool_calls(front: FrontUnderTest) -> None:
    says(front, f"{CALL}\n{STOP_CALL}")
    found = message(front, tools=[WEATHER, STOP], parallel_tool_calls=False)
    assert found["tool_calls"] == [("weather", '{"city": "Paris"}')]


@pytest.mark.parametrize("tokens_per_output", [1, 7, 1000])
def test_a_stream_has_deltas_as_in_openais_api(front: FrontUnderTest, tokens_per_output: int) -> None:
    says(front, f"I look.\n{CALL}\n{STOP_CALL}", tokens_per_output)
    with front.chat_stream(tools=[WEATHER, STOP], stream_options={"include_usage": True}) as events:
        *chunks, usage, done = list(events)
    assert done == "[DONE]"
    assert usage["choices"] == []
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == "I look."
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    calls: dict[int, dict[str, Any]] = {}
    for choice in choices:
        for delta in choice["delta"].get("tool_calls", ()):
            assert choice["delta"].get("content") is None
            if delta["index"] not in calls:
                assert delta["type"] == "function"
                assert delta["function"]["arguments"] == ""
                calls[delta["index"]] = {"id": delta["id"], **delta["function"]}
            else:
                assert set(delta) == {"index", "function"}
                assert set(delta["function"]) == {"arguments"}
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    assert [(each["name"], each["arguments"]) for each in calls.values()] == [
        ("weather", '{"city": "Paris"}'),
        ("stop", "{}"),
    ]
    assert list(calls) == [0, 1]


def test_ids_of_calls_repeat_with_the_request_and_differ_between_choices_and_prompts(front: FrontUnderTest) -> None:
    says(front, CALL)

    def ids(content: str) -> list[str]:
        document = front.chat(content, tools=[WEATHER], n=2, request_id="r1").json()
        return [choice["message"]["tool_calls"][0]["id"] for choice in document["choices"]]

    first = ids("Hi")
    assert len(set(first)) == 2
    assert ids("Hi") == first
    assert not set(ids("Ho")) & set(first)


def test_logprobs_have_every_token_of_a_call(front: FrontUnderTest) -> None:
    says(front, CALL)
    whole = front.chat(tools=[WEATHER], logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in whole) == f"{CALL}<|im_end|>"
    with front.chat_stream(tools=[WEATHER], logprobs=True) as events:
        pieces = [
            entry["token"]
            for event in events
            if event != "[DONE]"
            for choice in event["choices"]
            for entry in (choice["logprobs"] or {"content": ()})["content"]
        ]
    assert "".join(pieces) == f"{CALL}<|im_end|>"


HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {"id": "b", "type": "function", "function": {"name": "stop", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "stopped"}]},
]


def test_a_template_without_tools_gets_them_in_the_messages(front: FrontUnderTest) -> None:
    assert front.chat(messages=HISTORY, tools=[WEATHER]).status_code == 200
    text = prompt(front)
    system, rest = text.split("user\nWeather?\n")
    assert system.startswith("system\n# Tools\n")
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in system
    assert '<tool_call>\n{"name": "FUNCTION", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>' in system
    assert rest == (
        f"assistant\n{CALL}\n{STOP_CALL}\n"
        "user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nstopped\n</tool_response>\n"
        "assistant\n"
    )


def test_a_system_message_keeps_its_text_before_the_tools(front: FrontUnderTest) -> None:
    messages = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    front.chat(messages=messages, tools=[WEATHER])
    assert prompt(front).startswith("system\nBe short.\n\n# Tools\n")


def test_history_with_calls_is_written_even_without_tools(front: FrontUnderTest) -> None:
    front.chat(messages=HISTORY)
    assert prompt(front).startswith(f"user\nWeather?\nassistant\n{CALL}\n")


def test_a_template_with_tools_gets_them_as_objects(thinker: FrontUnderTest) -> None:
    assert thinker.chat(messages=HISTORY, tools=[WEATHER]).status_code == 200
    assert prompt(thinker) == (
        f"<tools>{json.dumps(WEATHER)}</tools>\n[user]Weather?\n"
        '[assistant]<tool_call>weather{"city": "Paris"}</tool_call><tool_call>stop{}</tool_call>\n'
        "[tool]rain\n[tool]stopped\n[assistant]"
    )


def test_a_template_that_joins_texts_gets_arguments_as_text(front: FrontUnderTest) -> None:
    use_template(front, TEMPLATE.replace("call.function.arguments | tojson", "'=' + call.function.arguments"))
    assert front.chat(messages=HISTORY, tools=[WEATHER]).status_code == 200
    assert '<tool_call>weather={"city": "Paris"}</tool_call>' in prompt(front)


def test_a_template_without_system_messages_gets_tools_in_the_first_message(front: FrontUnderTest) -> None:
    refusing = "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}"
    use_template(front, refusing + "{% endif %}[{{ message.role }}]{{ message.content }}{% endfor %}")
    assert front.chat(tools=[WEATHER]).status_code == 200
    assert prompt(front).startswith("[user]# Tools\n")
    assert prompt(front).endswith("\n\nHi")


def test_tokenize_counts_tools(front: FrontUnderTest) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    document = front.http.post("/tokenize", json={"messages": messages, "tools": [WEATHER]}).json()
    front.chat(messages=messages, tools=[WEATHER])
    assert document["tokens"] == list(front.do(lambda: front.core.submits[-1]).prompt_ids)


def grammar(front: FrontUnderTest) -> tuple[str, str]:
    """The grammar for the answer to the last request, and the text after which it begins."""
    params = front.do(lambda: front.core.submits[-1]).params
    return params.grammar, params.grammar_after


def test_forced_and_strict_calls_have_a_grammar(front: FrontUnderTest) -> None:
    says(front, CALL)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for fields in ({"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert front.chat(tools=[WEATHER], **fields).status_code == 200
        assert grammar(front) == ("", "")
    named = {"type": "function", "function": {"name": "weather"}}
    for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {"tool_choice": "auto", "tools": [strict]}):
        assert front.chat(**{"tools": [WEATHER], **fields}).status_code == 200
        assert "weather" in grammar(front)[0]


def test_the_grammar_of_calls_begins_after_open_reasoning(front: FrontUnderTest) -> None:
    use_template(front, OPEN_TEMPLATE)
    says(front, f"Hm.</think>\n\n{CALL}")
    assert message(front, tools=[WEATHER], tool_choice="required")["reasoning"] == "Hm."
    assert grammar(front)[1] == "</think>"
    front.chat(tools=[WEATHER], tool_choice="required", reasoning_effort="none")
    assert grammar(front)[1] == ""


def test_a_schema_that_cannot_be_enforced_is_refused_for_strict_tools_alone(front: FrontUnderTest) -> None:
    says(front, CALL)
    parameters = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert front.chat(tools=[function(parameters=parameters)], tool_choice="required").status_code == 200
    refused = front.chat(tools=[function(parameters=parameters, strict=True)]).json()["error"]
    assert refused["param"] == "tools"
    assert "uniqueItems" in refused["message"]


def only(mode: str, *tools: Any) -> dict[str, Any]:
    """A tool_choice that allows some of the tools."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_shown_and_called(thinker: FrontUnderTest, mode: str) -> None:
    says(thinker, STOP_CALL)
    named = {"type": "function", "function": {"name": "stop"}}
    found = message(thinker, tools=[WEATHER, STOP], tool_choice=only(mode, named))
    assert (found["tool_calls"], found["finish_reason"]) == ([("stop", "{}")], "tool_calls")
    assert '"stop"' in prompt(thinker) and "weather" not in prompt(thinker)
    text, _ = grammar(thinker)
    assert ("stop" in text, "weather" in text) == (mode == "required", False)


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [5]}, "tools[0].type"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [function(name="a" * 65)]}, "tools[0].function.name"),
        ({"tools": [function(name="a\n")]}, "tools[0].function.name"),
        ({"tools": [function(name=None)]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [function(description=5)]}, "tools[0].function.description"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function(parameters=5)]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(name=f"f{number}") for number in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [function(description="x" * 300_000)]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [WEATHER], "tool_choice": only("any", WEATHER)}, "tool_choice.allowed_tools.mode"),
        ({"tools": [WEATHER], "tool_choice": only("auto")}, "tool_choice.allowed_tools"),
        ({"tools": [WEATHER], "tool_choice": only("auto", STOP)}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": only("auto", 5)}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "function_call": {"name": 5}}]}, "messages[0].function_call.name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_tools_are_refused_by_name(front: FrontUnderTest, fields: dict[str, Any], field: str) -> None:
    response = front.chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_a_tool_without_parameters_takes_none() -> None:
    for given in (None, {}):
        [tool] = tool_use([function(parameters=given)], None, None).tools
        assert tool.parameters == {"type": "object", "properties": {}}


def test_the_largest_number_of_tools_is_accepted(front: FrontUnderTest) -> None:
    tools = [function(name=f"f{number}") for number in range(MAX_TOOLS)]
    assert len(tool_use(tools, "required", False).callable) == MAX_TOOLS
