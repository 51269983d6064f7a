"""Prompts of embeddings over HTTP, against a fake core whose model has embeddings of four elements.

test_saved_tensor.py tests the files in the field.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rayloom_engine.core.embeds import EmbeddedPrompt, Embeds
from rayloom_engine.errors import QueueFull
from rayloom_engine.front.generation import admission
from rayloom_engine.front.http.body import THREAD_ABOVE_BYTES
from rayloom_engine.front.openai.embeds import field as field_module
from rayloom_engine.protocol.messages import Submit
from rt_embeds import field_of, saved
from rt_fake_core import say
from rt_front import FrontUnderTest, events, running_front

FIRST = torch.arange(12, dtype=torch.float32).reshape(3, 4)
SECOND = torch.ones((2, 4), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front"), enable_prompt_embeds=True) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> FrontUnderTest:
    running.do(running.core.reset)
    return running


def _rows(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _submits(front: FrontUnderTest) -> list[Submit]:
    return front.do(lambda: list(front.core.submits))


def _refusal(front: FrontUnderTest, **body: Any) -> tuple[str, str]:
    """Message and field of the 400 for a request with FIRST as its prompt, unless `body` has another one."""
    answer = front.http.post("/v1/completions", json={"prompt_embeds": field_of(FIRST), **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert _submits(front) == []
    return error["message"], error["param"]


def test_embeddings_reach_the_core_with_a_placeholder_for_each_position(front: FrontUnderTest) -> None:
    answer = front.http.post("/v1/completions", json={"prompt_embeds": field_of(FIRST), "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    document = answer.json()
    assert document["choices"][0]["text"] == "Hello there."
    assert document["choices"][0]["prompt_token_ids"] is None
    assert document["usage"]["prompt_tokens"] == 3
    [submit] = _submits(front)
    assert submit.prompt_ids == (0, 0, 0)
    assert submit.embeds == Embeds("float32", 4, _rows(FIRST))
    assert submit.prompt().embeds is submit.embeds


@pytest.mark.parametrize("prompt", [None, "", []])
def test_without_a_prompt_there_are_only_embeddings(front: FrontUnderTest, prompt: object) -> None:
    body = {"prompt_embeds": field_of(FIRST), "prompt": prompt}
    assert front.http.post("/v1/completions", json=body).status_code == 200
    assert [submit.embeds is not None for submit in _submits(front)] == [True]


def test_prompts_of_embeddings_come_before_the_others(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", lambda submit: say(str(len(submit.prompt_ids)))(submit)))
    body = {"prompt_embeds": [field_of(FIRST), field_of(SECOND)], "prompt": ["abcd", "abcde"], "n": 2}
    document = front.http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in document["choices"]] == ["3", "3", "2", "2", "4", "4", "5", "5"]
    assert document["usage"]["prompt_tokens"] == 14
    embeds = [submit.embeds for submit in _submits(front)]
    first, second = Embeds("float32", 4, _rows(FIRST)), Embeds("bfloat16", 4, _rows(SECOND))
    assert embeds == [first, first, second, second, None, None, None, None]
    assert front.do(lambda: front.core.num_prompts) == 4, "the choices of a prompt share its embeddings"


def test_a_stream_of_embeddings_continues_after_the_core_has_died(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    body = {"prompt_embeds": field_of(FIRST), "stream": True, "max_tokens": 12}
    with front.http.stream("POST", "/v1/completions", json=body) as response:
        stream = events(response)
        received = [next(stream)]
        front.do(front.core.die)
        front.wait_until(lambda: len(front.core.submits) == 2, "the sequence is submitted again")
        front.do(front.core.release)
        received += stream
    assert "".join(event["choices"][0]["text"] for event in received if event != "[DONE]") == "Hello there."
    before, after = _submits(front)
    assert after.is_resume and after.embeds == before.embeds == Embeds("float32", 4, _rows(FIRST))


def test_a_long_prompt_is_read_in_a_thread(front: FrontUnderTest) -> None:
    rows = torch.zeros((500, 4))
    large = torch.zeros((THREAD_ABOVE_BYTES // 16, 4))
    large[:500] = rows = torch.arange(2000.0).reshape(500, 4) / 2
    field = field_of(large[:500])  # torch.save writes the whole storage
    assert len(field) > THREAD_ABOVE_BYTES
    assert front.http.post("/v1/completions", json={"prompt_embeds": field, "max_tokens": 2}).status_code == 200
    assert _submits(front)[0].embeds == Embeds("float32", 4, _rows(rows))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, FIRST[1:]),
        ({"truncate_prompt_tokens": 1, "truncation_side": "right"}, FIRST[:1]),
        ({"truncate_prompt_tokens": 3}, FIRST),
    ],
)
def test_a_prompt_can_be_cut_like_a_text(front: FrontUnderTest, fields: dict[str, Any], kept: torch.Tensor) -> None:
    answer = front.http.post("/v1/completions", json={"prompt_embeds": field_of(FIRST), **fields})
    assert answer.json()["usage"]["prompt_tokens"] == len(kept)
    assert _submits(front)[0].embeds == Embeds("float32", 4, _rows(kept))


@pytest.mark.parametrize(
    ("body", "sentence", "field"),
    [
        ({"echo": True}, "echo with prompt_embeds is not supported", "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs with prompt_embeds is not supported", "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search with prompt_embeds is not supported", "use_beam_search"),
        ({"prompt_embeds": "#"}, "prompt_embeds is not base64", "prompt_embeds"),
        ({"prompt_embeds": "é"}, "prompt_embeds is not base64", "prompt_embeds"),
        ({"prompt_embeds": ""}, "prompt_embeds cannot be used: it is not a file of torch.save", "prompt_embeds"),
        ({"prompt_embeds": []}, "must be a base64 string or a list of base64 strings, and not empty", "prompt_embeds"),
        ({"prompt_embeds": [1]}, "must be a base64 string or a list of base64 strings", "prompt_embeds"),
        ({"prompt_embeds": {"a": 1}}, "must be a base64 string or a list of base64 strings", "prompt_embeds"),
        ({"prompt_embeds": field_of(FIRST[:, :3])}, "the model needs [positions, 4]", "prompt_embeds"),
        ({"prompt_embeds": field_of(FIRST / 0)}, "an element that is NaN, infinite", "prompt_embeds"),
        ({"prompt_embeds": field_of(torch.zeros(512, 4))}, "512 tokens", None),
        ({"prompt_embeds": [field_of(FIRST)] * 600, "n": 2}, "the request asks for 1200 choices", None),
    ],
)
def test_a_prompt_that_cannot_be_computed_is_refused(
    front: FrontUnderTest, body: dict[str, Any], sentence: str, field: str | None
) -> None:
    message, param = _refusal(front, **body)
    assert sentence in message
    assert param == field


def test_a_pickle_that_names_other_code_is_refused_by_name(front: FrontUnderTest) -> None:
    field = base64.b64encode(saved(torch.nn.Linear(4, 4).requires_grad_(False))).decode()
    message, _ = _refusal(front, prompt_embeds=field)
    assert message.startswith('prompt_embeds cannot be used: its pickle has the name "torch.nn.modules.linear.Linear"')


def test_embeddings_of_all_requests_together_are_limited(
    front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIRST has 48 bytes. The choices of a prompt share them, and an only request may be larger than the limit."""
    monkeypatch.setattr(admission, "MAX_HELD_EMBEDS_BYTES", 50)
    front.do(lambda: setattr(front.core, "hold_after", 2))
    many = {"prompt_embeds": [field_of(FIRST)] * 2, "n": 3, "max_tokens": 2}
    assert front.http.post("/v1/completions", json={**many, "max_tokens": 1}).status_code == 200
    body = {"prompt_embeds": field_of(FIRST), "stream": True, "n": 3}
    with front.http.stream("POST", "/v1/completions", json=body) as response:
        stream = events(response)
        next(stream)
        answer = front.http.post("/v1/completions", json={"prompt_embeds": field_of(SECOND[:1])})
        assert answer.status_code == 429
        assert "the embeddings of unfinished requests take 48 bytes, at most 50 are kept" in answer.text
        front.do(front.core.release)
        assert front.complete("text").status_code == 200


def test_embeddings_that_come_while_a_form_is_checked_count(
    front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_HELD_EMBEDS_BYTES", 50)
    front.do(lambda: setattr(front.core, "hold_after", 2))
    client = front.service.client
    is_checking = threading.Event()

    async def check(*_: object) -> tuple[str, ...]:
        is_checking.set()
        while not any(each.embeds for each in client.unfinished()):
            await asyncio.sleep(0)
        return ()

    monkeypatch.setattr(front.service.form_checks, "check", check)
    body = {"prompt_embeds": field_of(FIRST), "stream": True}
    with ThreadPoolExecutor(1) as thread:
        with_form = {"prompt_embeds": field_of(SECOND), "structured_outputs": {"regex": "a"}}
        answer = thread.submit(front.http.post, "/v1/completions", json=with_form)
        assert is_checking.wait(30.0)
        with front.http.stream("POST", "/v1/completions", json=body) as response:
            stream = events(response)
            next(stream)
            assert answer.result(30.0).status_code == 429
            front.do(front.core.release)


@pytest.mark.parametrize(("tenants", "room"), [(("a", "a"), 8), (("a", "b"), 0), (("", ""), 0)])
def test_a_key_leaves_as_many_bytes_to_others_as_it_holds(
    tenants: tuple[str, str], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request holds 8 bytes, and another of 4 comes. A named tenant counts its own bytes twice."""
    held, new = EmbeddedPrompt(Embeds("float32", 1, bytes(8))), EmbeddedPrompt(Embeds("float32", 1, bytes(4)))
    client = SimpleNamespace(unfinished=lambda: [SimpleNamespace(tenant=tenants[0], embeds=held.embeds)] * 2)
    least = 8 + 4 + (4 if tenants[1] else 0) + room
    monkeypatch.setattr(admission, "MAX_HELD_EMBEDS_BYTES", least)
    admission.check_embeds_room(client, [new], tenants[1])
    monkeypatch.setattr(admission, "MAX_HELD_EMBEDS_BYTES", least - 1)
    with pytest.raises(QueueFull, match="8 bytes" if room or not tenants[1] else "0 bytes"):
        admission.check_embeds_room(client, [new], tenants[1])


_BASE64 = st.binary(max_size=16).map(lambda data: base64.b64encode(data).decode())


@given(st.text(alphabet="Aw+=é", max_size=24) | st.lists(_BASE64, max_size=3).map("".join))
@example("AAAAAA==AAAA")
def test_slices_of_base64_decode_like_the_whole(text: str) -> None:
    try:
        expected = base64.b64decode(text, validate=True)
    except ValueError:
        expected = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field_module, "_SLICE_CHARS", 8)
        if expected is None:
            with pytest.raises(ValueError):
                field_module.decoded(text)
        else:
            assert field_module.decoded(text) == expected


def test_chats_have_no_such_field(front: FrontUnderTest) -> None:
    answer = front.chat(prompt_embeds=field_of(FIRST))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_embeds"
    assert "but of /v1/completions" in answer.json()["error"]["message"]


def test_behind_a_gateway_an_engine_must_take_embeddings(front: FrontUnderTest) -> None:
    text = front.service.text
    assert text is not None
    without = dataclasses.replace(text, model=msgspec.structs.replace(text.model, hidden_size=0))
    front.do(lambda: setattr(front.service, "text", without))
    message, _ = _refusal(front)
    front.do(lambda: setattr(front.service, "text", text))
    assert "not enabled on the engines behind this gateway" in message


def test_without_the_setting_a_sentence_names_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_front(tmp_path_factory.mktemp("other")) as front:
        message, param = _refusal(front)
        assert "start the server with --enable-prompt-embeds" in message
        assert "spec.engine.args.enablePromptEmbeds: true" in message
        assert param == "prompt_embeds"
