"""Completions, tokenize and detokenize over HTTP against a fake core."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rayloom_engine.front.openai import completions
from rayloom_engine.text.tokenizer import Tokenizer
from rt_fake_core import say
from rt_front import MODEL, FrontUnderTest, events, running_front


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> FrontUnderTest:
    running.do(running.core.reset)
    return running


def test_a_completion_has_openai_shape_and_16_tokens_by_default(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("x" * 100)))
    document = front.complete("ab").json()
    assert document["object"] == "text_completion"
    assert document["id"].startswith("cmpl-")
    assert document["choices"] == [
        {
            "index": 0,
            "text": "x" * 16,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "prompt_logprobs": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }
    ]
    assert document["usage"]["prompt_tokens"] == 2


def test_several_prompts_give_prompt_major_choices(front: FrontUnderTest) -> None:
    def echo_last(submit):
        return say(chr(submit.prompt_ids[-1]) + submit.sequence_id[-1])(submit)

    front.do(lambda: setattr(front.core, "script", echo_last))
    document = front.complete(["pa", "pb"], n=2).json()
    assert [(choice["index"], choice["text"]) for choice in document["choices"]] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b2"),
        (3, "b3"),
    ]
    assert document["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([72, 105], [(72, 105)]), ([[72], [105, 33]], [(72,), (105, 33)]), (["H"], [(72,)])],
    ids=["ids", "lists of ids", "strings"],
)
def test_prompts_can_be_token_ids(front: FrontUnderTest, prompt: object, expected: object) -> None:
    assert front.complete(prompt).status_code == 200
    assert [submit.prompt_ids for submit in front.do(lambda: list(front.core.submits))] == expected


def test_logprobs_and_echo_in_the_old_format(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("cd")))
    document = front.complete("ab", max_tokens=2, logprobs=1, echo=True).json()
    choice = document["choices"][0]
    assert choice["text"] == "abcd"
    other = {"!": -0.25}
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {**other, "b": -0.5}, {**other, "c": -0.5}, {**other, "d": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }


def test_prompt_logprobs_in_vllm_format(front: FrontUnderTest) -> None:
    choice = front.complete("ab", prompt_logprobs=1).json()["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "33": {"logprob": -0.25, "rank": 1, "decoded_token": "!"},
            "98": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
        },
    ]


def test_a_streamed_echo_has_the_same_text_and_offsets(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("cd")))
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 2, "logprobs": 1, "echo": True, "stream": True}
    with front.http.stream("POST", "/v1/completions", json=body) as response:
        received = list(events(response))
    choices = [event["choices"][0] for event in received[:-1]]
    assert "".join(choice["text"] for choice in choices) == "abcd"
    assert [offset for choice in choices for offset in choice["logprobs"]["text_offset"]] == [0, 1, 2, 3]
    assert received[-1] == "[DONE]"


def test_min_tokens_holds_for_stop_strings_too(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("a.b.c")))
    choice = front.complete("x", stop=".", min_tokens=3).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("a.b", ".")


def test_the_stop_string_can_stay_in_the_text(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("a.b.c")))
    assert front.complete("x", stop=".", include_stop_str_in_output=True).json()["choices"][0]["text"] == "a."


def test_tokenize_a_prompt_and_a_chat(front: FrontUnderTest) -> None:
    assert front.http.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True}).json() == {
        "tokens": [72, 105],
        "count": 2,
        "max_model_len": 512,
        "token_strs": ["H", "i"],
    }
    chat = {"messages": [{"role": "user", "content": "H"}], "add_generation_prompt": False}
    tokens = front.http.post("/tokenize", json=chat).json()["tokens"]
    assert tokens == [256, *b"user\nH", 257, *b"\n"]


def test_detokenize_is_the_way_back(front: FrontUnderTest) -> None:
    assert front.http.post("/detokenize", json={"tokens": [256, 72, 105]}).json() == {"prompt": "<|im_start|>Hi"}


def test_models_are_listed_and_found(front: FrontUnderTest) -> None:
    listed = front.http.get("/v1/models").json()
    assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [("tiny", 512)]
    assert front.http.get("/v1/models/tiny").json() == listed["data"][0]
    assert front.http.get("/v1/models/some/other").status_code == 404


def test_a_prompt_beyond_the_context_is_refused_before_it_is_decoded(
    front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = Tokenizer.decode

    def count(self: Tokenizer, ids: Sequence[int], **options: bool) -> str:
        decoded.append(len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", count)
    refused = front.complete([97] * 500_000, echo=True, max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "the prompt has 500000" in refused.json()["error"]["message"]
    assert decoded == []


def test_a_long_prompt_of_ids_is_decoded_beside_the_loop(
    front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "DECODE_IN_THREAD_ABOVE_TOKENS", 100)
    threads: list[bool] = []
    loop_thread = front.do(threading.get_ident)
    echo = completions._echo

    def note(*given: Any) -> Any:
        threads.append(threading.get_ident() == loop_thread)
        return echo(*given)

    monkeypatch.setattr(completions, "_echo", note)
    choices = front.complete([[97] * 100, [98] * 101], echo=True, max_tokens=1).json()["choices"]
    assert [choice["text"] for choice in choices] == ["a" * 100 + "H", "b" * 101 + "H"]
    assert threads == [True, False]
