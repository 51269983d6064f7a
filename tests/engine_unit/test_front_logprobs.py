"""`max_logprobs`, `enable_force_include_usage`, `return_tokens_as_token_ids`, and a prompt's logprobs in streams.

The core is a fake with bytes as tokens: each token has the log-probability -0.5, and the most likely token is "!" with
-0.25.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rayloom_engine.errors import RequestError
from rayloom_engine.front.generation.admission import check_num_logprobs
from rayloom_engine.sampling_params import SamplingParams
from rt_byte_model import VOCAB_SIZE
from rt_fake_core import say
from rt_front import FrontUnderTest, events, running_front


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    settings = {"max_logprobs": -1, "enable_force_include_usage": True, "return_tokens_as_token_ids": True}
    with running_front(tmp_path_factory.mktemp("front"), **settings) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> FrontUnderTest:
    running.do(running.core.reset)
    running.do(lambda: setattr(running.core, "script", say("abc")))
    return running


def streamed(front: FrontUnderTest, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "stream": True, **fields}
    with front.http.stream("POST", path, json=body) as response:
        return [event for event in events(response) if isinstance(event, dict)]


def test_minus_one_asks_for_the_whole_vocabulary(front: FrontUnderTest) -> None:
    assert front.complete(logprobs=-1, prompt_logprobs=-1).status_code == 200
    assert front.chat(logprobs=True, top_logprobs=-1, max_tokens=1).status_code == 200
    completion, chat = (submit.params for submit in front.do(lambda: list(front.core.submits)))
    assert (completion.logprobs, completion.prompt_logprobs) == (VOCAB_SIZE, VOCAB_SIZE)
    assert (chat.logprobs, chat.prompt_logprobs) == (VOCAB_SIZE, None)


def test_tokens_are_named_by_their_ids_unless_the_request_says_otherwise(front: FrontUnderTest) -> None:
    for fields, names in (({}, ["token_id:97", "token_id:98"]), ({"return_tokens_as_token_ids": False}, ["a", "b"])):
        completion = front.complete(logprobs=0, max_tokens=2, **fields).json()["choices"][0]
        assert completion["logprobs"]["tokens"] == names
        chat = front.chat(logprobs=True, max_tokens=2, **fields).json()["choices"][0]
        assert [entry["token"] for entry in chat["logprobs"]["content"]] == names


def test_no_more_than_the_vocabulary_is_given(front: FrontUnderTest) -> None:
    error = front.chat(logprobs=True, top_logprobs=VOCAB_SIZE + 1).json()["error"]
    assert error["param"] == "top_logprobs"
    assert error["message"].startswith(f"top_logprobs must be at most {VOCAB_SIZE} on this server")


@pytest.mark.parametrize(
    ("given", "most", "words"),
    [
        ({"logprobs": 21}, 20, "logprobs must be at most 20 on this server, given 21; lower it, or start the server"),
        ({"prompt_logprobs": 4}, 3, "prompt_logprobs must be at most 3 on this server, given 4"),
        ({"logprobs": -1}, 20, "given -1, the whole vocabulary of 50 tokens"),
        ({"logprobs": 51}, -1, "logprobs must be at most 50"),
    ],
)
def test_more_alternatives_than_the_setting_allows_are_refused(given: dict[str, int], most: int, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        SamplingParams(**given).check_logprobs(most, 50)
    assert refused.value.field == next(iter(given))


def test_as_many_as_the_setting_allows_pass() -> None:
    params = SamplingParams(logprobs=20, prompt_logprobs=0)
    assert params.check_logprobs(20, 50) is params
    assert SamplingParams(logprobs=-1).check_logprobs(50, 50).logprobs == 50


def test_a_long_answer_with_many_alternatives_is_refused_with_the_length_that_works() -> None:
    few = SamplingParams(logprobs=20, max_tokens=None)
    check_num_logprobs([(1,) * 10], few, 1_000_000)
    many = SamplingParams(logprobs=9999, n=2, max_tokens=300)  # 2 x 300 x 10,000 = 6,000,000
    check_num_logprobs([(1,) * 10], many, 1000)
    with pytest.raises(RequestError, match="set max_tokens to at most 150"):
        check_num_logprobs([(1,) * 10] * 2, many, 1000)
    with pytest.raises(RequestError, match="set max_tokens to at most 300"):
        check_num_logprobs([(1,) * 10], SamplingParams(logprobs=9999, n=2, max_tokens=None), 1000)


def test_a_streams_first_chunk_has_the_prompts_logprobs(front: FrontUnderTest) -> None:
    chunks = streamed(front, "/v1/completions", prompt=["ab", "xyz"], prompt_logprobs=1)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    given = {choice["index"]: choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice}
    assert [(index, len(entries)) for index, entries in sorted(given.items())] == [(0, 2), (1, 3)]
    assert given[0] == front.complete("ab", prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"]

    messages = [{"role": "user", "content": "Hi"}]
    chunks = streamed(front, "/v1/chat/completions", messages=messages, n=2, prompt_logprobs=1)
    assert chunks[0]["prompt_logprobs"] == front.chat(prompt_logprobs=1).json()["prompt_logprobs"]
    assert not any("prompt_logprobs" in chunk for chunk in chunks[1:])


def test_every_chunk_has_the_usage_where_the_server_says_so(front: FrontUnderTest) -> None:
    chunks = streamed(front, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert (counts[0], counts[-2:]) == (0, [4, 4]), "the role; the end, and the last chunk without choices"
    assert counts == sorted(counts)
    assert chunks[-1]["choices"] == []
