"""Reasoning over HTTP against a fake core: whole and streamed answers, reasoning tokens, and reasoning in templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rayloom_engine.core.decoding import ThinkingBudget
from rt_front import FrontUnderTest, running_front, text_of
from rt_tools import CALL, OPEN_TEMPLATE, TEMPLATE, WEATHER, message, prompt, roomy, says, use_template


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


def test_reasoning_is_apart_from_the_content_and_counted(thinker: FrontUnderTest) -> None:
    says(thinker, "<think>\nHm, ä.\n</think>\n\nYes.")
    document = thinker.chat().json()
    found = document["choices"][0]["message"]
    assert found == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning": "Hm, ä.",
        "reasoning_content": "Hm, ä.",
    }
    expected = len("<think>\nHm, ä.\n</think>".encode())
    assert document["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected
    assert document["usage"]["completion_tokens"] == expected + len("\n\nYes.") + 1


@pytest.mark.parametrize("tokens_per_output", [1, 5, 1000])
def test_a_stream_of_reasoning(thinker: FrontUnderTest, tokens_per_output: int) -> None:
    says(thinker, f"<think>\nHm, ä.\n</think>\n\n{CALL}", tokens_per_output)
    with thinker.chat_stream(tools=[WEATHER], stream_options={"include_usage": True}) as events:
        *chunks, usage, _ = list(events)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, ä."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm, ä."
    assert text_of(chunks) == ""
    assert sum("tool_calls" in delta for delta in deltas) >= 2
    expected = len("<think>\nHm, ä.\n</think>".encode())
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected


def test_the_budget_of_the_reasoning_reaches_the_core_with_the_models_tags(front: FrontUnderTest) -> None:
    def budget(source: str, **fields: Any) -> ThinkingBudget | None:
        use_template(front, source)
        says(front, "Hm.</think>Yes.")
        assert front.chat(**fields).status_code == 200
        return front.do(lambda: front.core.submits[-1]).params.thinking

    tags = {"ends": ("</think>", "<tool_call>"), "end_ids": tuple(b"</think>"), "calls": "hermes"}
    assert budget(OPEN_TEMPLATE, thinking_token_budget=7, tools=[WEATHER]) == ThinkingBudget(
        num_tokens=7, start="", **tags
    )
    assert budget(TEMPLATE, thinking_token_budget=0, tools=[WEATHER]) == ThinkingBudget(
        num_tokens=0, start="<think>", **tags
    )
    assert budget(OPEN_TEMPLATE) is None
    assert budget(OPEN_TEMPLATE, thinking_token_budget=-1) is None
    assert budget("{{ messages[0].content }}", thinking_token_budget=5) is None  # a model without reasoning


def test_reasoning_can_be_left_out(thinker: FrontUnderTest) -> None:
    says(thinker, "<think>Hm.</think>Yes.")
    assert message(thinker, include_reasoning=False) == {"content": "Yes.", "finish_reason": "stop"}


def test_the_prompt_decides_whether_an_answer_begins_with_reasoning(front: FrontUnderTest) -> None:
    use_template(front, OPEN_TEMPLATE)
    says(front, "Hm.</think>Yes.")
    assert message(front)["reasoning"] == "Hm."
    says(front, "Yes.")
    assert message(front, reasoning_effort="none") == {"content": "Yes.", "finish_reason": "stop"}
    assert prompt(front).endswith("<think>\n<think>\n\n</think>\n\n")
    assert message(front)["reasoning"] == "Yes."  # without an end tag, the whole text is reasoning


def test_reasoning_of_earlier_messages_reaches_the_template(front: FrontUnderTest) -> None:
    use_template(
        front, "{% for message in messages %}{{ message.reasoning_content }}={{ message.reasoning }};{% endfor %}"
    )
    front.chat(messages=[{"role": "assistant", "content": "Yes.", "reasoning": "Hm."}])
    assert prompt(front) == "Hm.=Hm.;"


@pytest.mark.parametrize(
    ("question", "begun", "is_reasoning"),
    [
        ("What does <think> mean?", "It", False),
        ("What does <think> mean?", "<think>It", True),
        ("What does </think> mean?", "<think>It", True),
        ("Hi", "Hi <think>Hi", True),
        ("Hi", "<think>Hm</think>It", False),
    ],
)
def test_a_continued_message_is_reasoning_only_if_it_has_opened_the_reasoning_itself(
    thinker: FrontUnderTest, question: str, begun: str, is_reasoning: bool
) -> None:
    says(thinker, " is a tag.")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": begun}]
    found = message(thinker, messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt(thinker).endswith(begun)
    assert (found["content"], found.get("reasoning")) == (("", "is a tag.") if is_reasoning else (" is a tag.", None))
