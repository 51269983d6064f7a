"""vLLM's fields that limit tokens, cut prompts, pass documents or repeat the last message of a chat.

The core is a fake with bytes as tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rayloom_engine.choice_limits import check_num_allowed_ids
from rayloom_engine.protocol.messages import Submit
from rayloom_engine.sampling_params import SamplingParams
from rayloom_engine.text.tokenizer import Tokenizer
from rt_fake_core import say
from rt_front import FrontUnderTest, events, running_front, text_of

SHOWS_DOCUMENTS = "{% for d in documents or [] %}{{ d.text }};{% endfor %}{{ messages[-1].content }}"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> FrontUnderTest:
    running.do(running.core.reset)
    return running


def only_submit(front: FrontUnderTest) -> Submit:
    (submit,) = front.do(lambda: list(front.core.submits))
    return submit


def test_limits_of_tokens_reach_the_core(front: FrontUnderTest) -> None:
    fields = {"bad_words": ["no"], "allowed_token_ids": [65, 66.0], "logprob_token_ids": [67, 68], "logprobs": 5}
    assert front.complete(**fields).status_code == 200
    params = only_submit(front).params
    assert params.bad_words == (tuple(b"no"),)
    assert params.allowed_token_ids == (65, 66)
    assert (params.logprobs, params.logprob_token_ids) == (0, (67, 68))


def test_a_request_may_switch_speculation_off(front: FrontUnderTest) -> None:
    assert front.complete(speculation=False).status_code == 200
    assert only_submit(front).params.speculation is False
    refused = front.complete(speculation="no")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculation")


def test_a_routers_token_ids_replace_the_messages_as_the_prompt(front: FrontUnderTest) -> None:
    given = {"prompt_token_ids": [65, 66.0], "do_remote_prefill": True}
    answer = front.chat("unrelated", kv_transfer_params=given, return_token_ids=True).json()
    assert only_submit(front).prompt_ids == (65, 66)
    assert answer["prompt_token_ids"] == [65, 66]
    assert answer["kv_transfer_params"] is None
    assert "kv_transfer_params" not in front.chat().json()


def test_many_transferred_token_ids_are_decoded_beside_the_streams(
    front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[int, str] = {}
    decode = Tokenizer.decode

    def noted(self: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        threads[len(ids)] = threading.current_thread().name
        return decode(self, ids, skip_special_tokens=skip_special_tokens)

    in_loop = front.do(lambda: threading.current_thread().name)
    monkeypatch.setattr(Tokenizer, "decode", noted)
    for num in (100, 5000):
        front.chat(kv_transfer_params={"prompt_token_ids": [65] * num})
    assert threads[100] == in_loop
    assert threads[5000] != in_loop


def test_other_transfers_leave_the_prompt_as_it_is(front: FrontUnderTest) -> None:
    plain = front.chat(return_token_ids=True).json()["prompt_token_ids"]
    for fields in ({"kv_transfer_params": {"do_remote_decode": True}}, {"kv_transfer_params": {}}):
        assert front.chat(return_token_ids=True, **fields).json()["prompt_token_ids"] == plain
    echoed = {"kv_transfer_params": {"prompt_token_ids": [65]}, "echo": True, "return_token_ids": True}
    assert front.chat(**echoed).json()["prompt_token_ids"] == plain, "an echo needs the messages"
    assert front.complete("ab", kv_transfer_params={"a": 1}).json()["kv_transfer_params"] is None


@pytest.mark.parametrize("ids", [[], "ab", [True], [1.5], [-1], [999], [[1]], {}])
def test_a_transferred_prompt_is_checked(front: FrontUnderTest, ids: object) -> None:
    response = front.chat(kv_transfer_params={"prompt_token_ids": ids})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params.prompt_token_ids")


@pytest.mark.parametrize(("num_prompts", "n", "num_ids"), [(1, 128, 4097), (64, 2, 4097), (2, 1, 2**18 + 1)])
def test_allowed_tokens_of_all_choices_are_limited(
    front: FrontUnderTest, num_prompts: int, n: int, num_ids: int
) -> None:
    prompts = [[65]] * num_prompts
    response = front.complete(prompts, n=n, allowed_token_ids=list(range(num_ids)), max_tokens=1)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "allowed_token_ids")
    assert f"{num_ids} ids for each of {num_prompts * n} choices" in error["message"]
    assert "at most 524288 are allowed; lower n" in error["message"]


def test_as_many_allowed_tokens_as_the_limit_pass_it() -> None:
    check_num_allowed_ids(2, SamplingParams(n=64, allowed_token_ids=range(4096)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": [3]}, "bad_words[0]"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncation_side": "middle", "truncate_prompt_tokens": 3}, "truncation_side"),
    ],
)
def test_bad_values_are_refused_with_the_name(front: FrontUnderTest, fields: dict[str, Any], param: str) -> None:
    for response in (front.chat(**fields), front.complete(**fields)):
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, b"def"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"def"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": 99}, b"abcdef"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 508}, b"cdef"),  # the context has 512 tokens
        ({"truncate_prompt_tokens": -1, "max_tokens": 1}, b"abcdef"),
    ],
)
def test_a_prompt_is_cut_at_the_side_that_was_asked_for(
    front: FrontUnderTest, fields: dict[str, Any], kept: bytes
) -> None:
    response = front.complete("abcdef", echo=True, **fields)
    assert bytes(only_submit(front).prompt_ids) == kept
    assert response.json()["usage"]["prompt_tokens"] == len(kept)
    assert response.json()["choices"][0]["text"].startswith(kept.decode())


def test_a_chat_is_cut_as_well(front: FrontUnderTest) -> None:
    assert front.chat("Hi", truncate_prompt_tokens=4).status_code == 200
    assert len(only_submit(front).prompt_ids) == 4


def test_documents_are_a_variable_of_the_template(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "model").mkdir()
    (folder / "model" / "chat_template.jinja").write_text(SHOWS_DOCUMENTS)
    with running_front(folder) as front:
        body = {"messages": [{"role": "user", "content": "Hi"}], "documents": [{"text": "one"}, {"text": "two"}]}
        assert bytes(front.http.post("/tokenize", json=body).json()["tokens"]) == b"one;two;Hi"
        assert front.chat("Hi", documents=body["documents"]).status_code == 200
        assert bytes(only_submit(front).prompt_ids) == b"one;two;Hi"
        assert front.chat("Hi", documents=["one"]).json()["error"]["param"] == "documents[0]"


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"role": "assistant", "content": "An apple"}, "An apple a day"),
        ({"role": "assistant", "content": [{"type": "text", "text": "An apple"}]}, "An apple a day"),
        ({"role": "user", "content": "An apple"}, " a day"),
    ],
)
@pytest.mark.parametrize("echo", [True, False])
def test_echo_repeats_the_assistants_last_message(
    front: FrontUnderTest, last: dict[str, Any], expected: str, echo: bool
) -> None:
    front.do(lambda: setattr(front.core, "script", say(" a day")))
    body = {"messages": [{"role": "user", "content": "Say"}, last], "echo": echo}
    whole = front.http.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["content"] == (expected if echo else " a day")
    with front.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert text_of(list(events(response))) == (expected if echo else " a day")
