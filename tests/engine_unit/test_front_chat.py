"""Chat over HTTP against a fake core: answers, streams, n, stops, usage, logprobs, pings.

Errors are in test_front_errors.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from rayloom_engine.front.app import api_app
from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.openai.answers.whole import PART_BYTES
from rayloom_engine.front.operations.service import Waits
from rt_fake_core import say
from rt_front import MODEL, FrontUnderTest, running_front, text_of


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front"), waits=Waits(ping_s=0.05, accept_s=0.05)) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> FrontUnderTest:
    running.do(running.core.reset)
    return running


def test_an_answer_has_openai_shape(front: FrontUnderTest) -> None:
    response = front.chat("Hi")
    document = response.json()
    assert response.status_code == 200
    assert document.pop("id").startswith("chatcmpl-")
    assert isinstance(document.pop("created"), int)
    assert re.fullmatch(r"rl-[0-9a-f]{12}", document.pop("system_fingerprint"))
    prompt_tokens = len("user\nHi\nassistant\n") + 3  # three special tokens
    assert document == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 13,
            "total_tokens": prompt_tokens + 13,
            "prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


def test_the_core_gets_prompt_seed_and_limits(front: FrontUnderTest) -> None:
    front.chat("Hi", temperature=0, seed=11, max_completion_tokens=5, stop_token_ids=[65])
    submit = front.do(lambda: front.core.submits[0])
    assert bytes(token for token in submit.prompt_ids if token < 256) == b"user\nHi\nassistant\n"
    assert (submit.params.temperature, submit.params.seed, submit.params.max_tokens) == (0.0, 11, 5)
    assert submit.params.stop_token_ids == (65,)
    assert not submit.is_resume


def test_an_answer_is_in_flight_until_all_of_it_was_sent(front: FrontUnderTest) -> None:
    """A drain waits for answers in flight. So a slow client still gets its whole answer."""
    front.do(lambda: setattr(front.core, "script", say("x" * 400)))
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "n": 3,
        "logprobs": True,
        "top_logprobs": 1,
    }
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[dict[str, Any]] = []
    in_flight: list[int] = []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        for _ in range(3):  # a slow client
            await asyncio.sleep(0)
        in_flight.append(front.service.lifecycle.num_in_flight)

    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "app": None}
    scope["headers"] = [(b"content-type", b"application/json")]
    handled = api_app(front.service, ApiKeys())(scope, receive, send)
    asyncio.run_coroutine_threadsafe(handled, front._loop).result(60.0)
    parts = [message["body"] for message in sent[1:]]
    assert len(parts) > 2
    assert max(map(len, parts)) == PART_BYTES
    assert len(json.loads(b"".join(parts))["choices"]) == 3
    assert in_flight == [1] * len(sent)
    assert front.do(lambda: front.service.lifecycle.num_in_flight) == 0


def test_without_max_tokens_a_chat_may_fill_the_context(front: FrontUnderTest) -> None:
    front.chat("Hi")
    submit = front.do(lambda: front.core.submits[0])
    assert submit.params.max_tokens == 512 - len(submit.prompt_ids)


def test_a_stream_opens_with_the_role_and_ends_with_done(front: FrontUnderTest) -> None:
    with front.chat_stream() as stream:
        received = list(stream)
    assert received[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert received[-1] == "[DONE]"
    last = received[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", None)
    assert [event["choices"][0]["finish_reason"] for event in received[:-2]] == [None] * (len(received) - 2)
    assert text_of(received) == "Hello there."
    assert {event["id"] for event in received[:-1]} == {received[0]["id"]}


def test_usage_comes_last_when_requested(front: FrontUnderTest) -> None:
    with front.chat_stream(stream_options={"include_usage": True}) as stream:
        received = list(stream)
    assert received[-2]["choices"] == []
    assert received[-2]["usage"]["completion_tokens"] == 13
    assert all(event["usage"] is None for event in received[:-2])


def test_usage_can_come_with_every_chunk(front: FrontUnderTest) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with front.chat_stream(stream_options=options) as stream:
        received = list(stream)
    counts = [event["usage"]["completion_tokens"] for event in received[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 13


def test_characters_are_never_cut_in_half(front: FrontUnderTest) -> None:
    text = "na\u00efve \U0001f600 \u6f22\u5b57"  # 2, 4 and 3 bytes a character, one token each byte
    front.do(lambda: setattr(front.core, "script", say(text)))
    with front.chat_stream() as stream:
        received = list(stream)
    assert "\ufffd" not in text_of(received)
    assert text_of(received) == text


def test_a_stop_string_across_tokens_ends_the_answer_and_frees_the_sequence(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("one END two")))
    front.do(lambda: setattr(front.core, "hold_after", 8))  # the core sends nothing after "one END "
    choice = front.chat(stop=["END"]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "END")
    front.wait_until(lambda: len(front.core.aborts) == 1, "the core hears of it")


def test_text_that_only_begins_like_a_stop_string_is_delivered(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("EN")))
    with front.chat_stream(stop="END") as stream:
        assert text_of(list(stream)) == "EN"


def test_a_stop_id_is_named_and_left_out_of_the_text(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", lambda _submit: list(b"abc")))
    choice = front.chat(stop_token_ids=[ord("c")]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", 99)


def test_max_tokens_ends_with_length(front: FrontUnderTest) -> None:
    document = front.chat(max_tokens=5).json()
    assert document["choices"][0]["message"]["content"] == "Hello"
    assert document["choices"][0]["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == 5


def test_three_choices_are_three_sequences_of_one_prompt(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", lambda submit: say(submit.sequence_id[-1])(submit)))
    document = front.chat(n=3, seed=5).json()
    assert [choice["message"]["content"] for choice in document["choices"]] == ["0", "1", "2"]
    assert document["usage"]["completion_tokens"] == 6
    submits = front.do(lambda: list(front.core.submits))
    assert [submit.fork_of for submit in submits] == [None, submits[0].sequence_id, submits[0].sequence_id]
    assert submits[0].params.seed == 5
    assert len({submit.params.seed for submit in submits}) == 3


def test_streamed_choices_have_their_index(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", lambda submit: say("choice " + submit.sequence_id[-1])(submit)))
    with front.chat_stream(n=3) as stream:
        received = list(stream)
    assert [text_of(received, index) for index in range(3)] == ["choice 0", "choice 1", "choice 2"]


def test_outputs_that_arrive_together_are_one_chunk(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "tokens_per_output", 100))
    with front.chat_stream() as stream:
        received = list(stream)
    assert [event["choices"][0]["delta"] for event in received[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello there."},
    ]


def test_logprobs_carry_bytes_and_alternatives(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("\u00e9")))
    content = front.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    top = [{"token": "!", "logprob": -0.25, "bytes": [33]}]
    assert content == [
        {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": top},
        {"token": "\ufffd", "logprob": -0.5, "bytes": [0xA9], "top_logprobs": top},
        {"token": "<|im_end|>", "logprob": -0.5, "bytes": list(b"<|im_end|>"), "top_logprobs": top},
    ]


def test_a_waiting_stream_is_kept_alive_by_comments(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 5))
    with front.chat_stream() as stream:
        received = []
        for event in stream:
            received.append(event)
            if received.count(": ping") == 2:
                break
        front.do(front.core.release)
        received += list(stream)
    assert text_of(received) == "Hello there."
    assert received[-1] == "[DONE]"


def test_text_parts_are_joined_and_developer_is_system(front: FrontUnderTest) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert front.chat(messages=messages).status_code == 200
    submit = front.do(lambda: front.core.submits[0])
    text = bytes(token for token in submit.prompt_ids if token < 256)
    assert text == b"system\nbe brief\nuser\nab\nassistant\n"


def test_token_ids_are_returned_when_requested(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("ok")))
    document = front.chat(return_token_ids=True).json()
    assert document["choices"][0]["token_ids"] == [*b"ok", 257]
    assert document["prompt_token_ids"][0] == 256
    with front.chat_stream(return_token_ids=True) as stream:
        received = list(stream)
    ids = [token for event in received[:-1] for token in event["choices"][0].get("token_ids", [])]
    assert ids == [*b"ok", 257]
