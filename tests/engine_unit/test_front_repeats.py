"""A client that repeats a request gets the answer to the first request: one computation, all tokens, the same id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayloom_engine.front.idempotency import kept_answers
from rt_fake_core import say
from rt_front import FrontUnderTest, running_front
from rt_raw_client import RawClient

TEXT = "Hello there, this answer has some length."
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 100},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT,
}
KEY = {"Idempotency-Key": "order-66"}
REQUEST_ID = {"X-Request-Id": "trace-7"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front"), api_keys=("one", "two"), max_num_seqs=12) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> Iterator[FrontUnderTest]:
    """A front whose core stops each answer after 5 tokens, until the test releases the core.

    After the test, the front forgets all kept answers.
    """
    running.do(running.core.reset)
    running.do(lambda: setattr(running.core, "script", say(TEXT)))
    running.do(lambda: setattr(running.core, "hold_after", 5))
    yield running
    running.do(running.core.release)
    running.wait_until(lambda: running.service.lifecycle.num_in_flight == 0, "every answer has ended")
    running.do(lambda: forget(running))


def forget(front: FrontUnderTest) -> None:
    book = front.kept_answers._book
    book.release(list(book._entries.values()))


def headers(given: dict[str, str], key: str = "one") -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **given}


def post(
    front: FrontUnderTest, path: str, body: dict[str, Any], given: dict[str, str], key: str = "one"
) -> httpx.Response:
    return front.http.post(path, json=body, headers=headers(given, key))


def begin(front: FrontUnderTest, path: str, body: dict[str, Any], given: dict[str, str]) -> RawClient:
    """A client whose request is computed up to the 5th token."""
    before = front.do(lambda: len(front.core.submits))
    client = RawClient(front.api_url, path, body, headers(given))
    front.wait_until(lambda: len(front.core.submits) == before + 1, "the core has the sequence")
    return client


def break_off(front: FrontUnderTest, client: RawClient) -> None:
    """Breaks the connection, and waits until the server has noticed it."""
    before = front.do(lambda: num_detached(front))
    client.vanish()
    front.wait_until(lambda: num_detached(front) == before + 1, "the server sees the broken connection")


def num_detached(front: FrontUnderTest) -> int:
    return len(front.kept_answers._book.detached())


def text_in(answer: str) -> str:
    """All text of an answer of any endpoint, whole or streamed."""
    found = []
    if not answer.startswith("{"):
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        for event in events:
            found += [
                part.get("text") or part.get("delta", {}).get("content") or "" for part in event.get("choices", [])
            ]
            if event.get("type") == "response.output_text.delta":
                found.append(event["delta"])
            if event.get("type") == "content_block_delta":
                found.append(event["delta"]["text"])
        return "".join(found)
    document = json.loads(answer)
    for choice in document.get("choices", []):
        found.append(choice.get("text") or choice["message"]["content"])
    for item in document.get("output", []):
        found += [part["text"] for part in item["content"]]
    return "".join(found + [part["text"] for part in document.get("content", [])])


@pytest.mark.parametrize("given", [KEY, REQUEST_ID], ids=["idempotency-key", "request-id"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", BODIES)
def test_a_repeat_after_a_broken_connection_gets_the_whole_answer(
    front: FrontUnderTest, path: str, is_stream: bool, given: dict[str, str]
) -> None:
    body = {**BODIES[path], "stream": is_stream}
    client = begin(front, path, body, given)
    seen = client.read_until(b"data: ") if is_stream else b""
    break_off(front, client)
    with ThreadPoolExecutor() as pool:
        repeat = pool.submit(post, front, path, body, given)
        front.wait_until(lambda: num_detached(front) == 0, "the repeat reads")
        front.do(front.core.release)
        answer = repeat.result(60.0)
    assert (answer.status_code, answer.headers["idempotent-replayed"]) == (200, "true")
    assert text_in(answer.text) == TEXT
    if is_stream:
        begun = seen.partition(b"\r\n\r\n")[2].partition(b"\r\n")[2]  # after the size of the first chunk
        first_event = begun.partition(b"\n\n")[0].decode()
        assert answer.text.startswith(first_event), "the same first event, with the same id and time"
    assert front.do(lambda: len(front.core.submits)) == 1
    assert front.do(lambda: front.core.aborts) == []


def test_a_finished_answer_is_kept_for_its_idempotency_key(front: FrontUnderTest) -> None:
    front.do(front.core.release)
    first = front.http.post("/v1/chat/completions", json=CHAT, headers=headers(KEY))
    second = front.http.post("/v1/chat/completions", json=CHAT, headers=headers(KEY))
    assert first.json() == second.json()
    assert ("idempotent-replayed" in first.headers, second.headers["idempotent-replayed"]) == (False, "true")
    assert first.headers["content-length"] == second.headers["content-length"]
    assert front.do(lambda: len(front.core.submits)) == 1


def test_the_same_request_id_is_computed_again_once_its_answer_was_sent(front: FrontUnderTest) -> None:
    front.do(front.core.release)
    for _ in range(2):
        answer = post(front, "/v1/chat/completions", CHAT, REQUEST_ID)
        assert "idempotent-replayed" not in answer.headers
    assert front.do(lambda: len(front.core.submits)) == 2
    assert front.do(lambda: len(front.kept_answers)) == 0


def test_two_connections_with_one_key_get_one_answer(front: FrontUnderTest) -> None:
    body = {**CHAT, "stream": True}
    with begin(front, "/v1/chat/completions", body, KEY) as first, ThreadPoolExecutor() as pool:
        first.read_until(b"o")
        second = pool.submit(post, front, "/v1/chat/completions", body, KEY)
        front.wait_until(
            lambda: [each.num_readers for each in front.kept_answers._book._entries.values()] == [2], "both read"
        )
        front.do(front.core.release)
        assert text_in(second.result(60.0).text) == TEXT
        assert first.read_until(b"[DONE]").count(b'"content"') == second.result().text.count('"content"')
    assert front.do(lambda: len(front.core.submits)) == 1


def test_two_connections_with_one_request_id_are_two_requests(front: FrontUnderTest) -> None:
    body = {**CHAT, "stream": True}
    with begin(front, "/v1/chat/completions", body, REQUEST_ID), begin(front, "/v1/chat/completions", body, REQUEST_ID):
        assert front.do(lambda: len(front.core.submits)) == 2
        front.do(front.core.release)


def test_the_first_connection_breaks_and_the_second_reads_on(front: FrontUnderTest) -> None:
    body = {**CHAT, "stream": True}
    first, second = begin(front, "/v1/chat/completions", body, KEY), None
    second = RawClient(front.api_url, "/v1/chat/completions", body, headers(KEY))
    second.read_until(b"o")
    first.vanish()
    front.wait_until(
        lambda: [each.num_readers for each in front.kept_answers._book._entries.values()] == [1], "one reads"
    )
    front.do(front.core.release)
    second.read_until(b"[DONE]")
    assert front.do(lambda: front.core.aborts) == []


def test_a_key_with_another_body_is_refused_and_names_nothing_elsewhere(front: FrontUnderTest) -> None:
    front.do(front.core.release)
    assert post(front, "/v1/chat/completions", CHAT, KEY).status_code == 200
    refused = post(front, "/v1/chat/completions", {**CHAT, "max_tokens": 99}, KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert "order-66 came before with another body" in refused.json()["error"]["message"]
    for path, key in (("/v1/messages", "one"), ("/v1/chat/completions", "two")):
        other = post(front, path, {**CHAT, "max_tokens": 99}, KEY, key)
        assert (other.status_code, "idempotent-replayed" in other.headers) == (200, False)


@pytest.mark.parametrize("key", ["", "two words", "ä", "x" * 256])
def test_a_key_that_is_none_is_refused(front: FrontUnderTest, key: str) -> None:
    refused = front.http.post(
        "/v1/chat/completions",
        json=CHAT,
        headers=[(b"authorization", b"Bearer one"), (b"idempotency-key", key.encode())],
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_idempotency_key")


def test_quotes_of_a_structured_field_do_not_belong_to_the_key(front: FrontUnderTest) -> None:
    front.do(front.core.release)
    first = post(front, "/v1/chat/completions", CHAT, KEY)
    second = post(front, "/v1/chat/completions", CHAT, {"Idempotency-Key": '"order-66"'})
    assert first.json() == second.json()


def test_a_failure_is_not_kept(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "refusal", ("queue_full", "full")))
    assert post(front, "/v1/chat/completions", CHAT, KEY).status_code == 429
    front.do(lambda: setattr(front.core, "refusal", None))
    front.do(front.core.release)
    assert text_in(post(front, "/v1/chat/completions", CHAT, KEY).text) == TEXT


def num_failed(front: FrontUnderTest) -> float:
    return front.do(front.service.metrics.failed.value)


def entries(front: FrontUnderTest) -> list[Any]:
    return list(front.kept_answers._book._entries.values())


def test_a_failure_counts_once_however_many_connections_read_it(front: FrontUnderTest) -> None:
    before = num_failed(front)
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(post, front, "/v1/chat/completions", CHAT, KEY) for _ in range(3)]
        front.wait_until(lambda: [each.num_readers for each in entries(front)] == [3], "all three read")
        front.wait_until(lambda: len(front.core.submits) == 1, "the core has the sequence")
        front.do(lambda: front.core.refuse(front.core.submits[0].sequence_id, "corrupt", "not a number"))
        assert [answer.result(60.0).status_code for answer in answers] == [500, 500, 500]
    assert num_failed(front) == before + 1


def test_a_failure_counts_though_nobody_reads_it_any_more(front: FrontUnderTest) -> None:
    before = num_failed(front)
    break_off(front, begin(front, "/v1/chat/completions", CHAT, KEY))
    front.do(lambda: front.core.refuse(front.core.submits[0].sequence_id, "corrupt", "not a number"))
    front.wait_until(lambda: len(front.kept_answers) == 0, "the failed answer is forgotten")
    assert num_failed(front) == before + 1


def test_a_repeat_has_the_request_id_of_the_first_answer_unless_it_sends_its_own(front: FrontUnderTest) -> None:
    front.do(front.core.release)
    body = {**CHAT, "request_id": "mine-7"}
    given: tuple[dict[str, str], ...] = (KEY, KEY, {**KEY, "X-Request-Id": "second"})
    answers = [post(front, "/v1/chat/completions", body, each) for each in given]
    assert [answer.json()["id"] for answer in answers] == ["chatcmpl-mine-7"] * 3
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine-7", "mine-7", "second"]


def test_metrics_count_repeats_and_the_answers_without_a_reader(front: FrontUnderTest) -> None:
    metrics = front.service.metrics
    before = front.do(metrics.repeats_answered.value)
    break_off(front, begin(front, "/v1/chat/completions", CHAT, KEY))
    assert 'rayloom:detached_answers{model_name="tiny"} 1' in front.http.get("/metrics").text
    with ThreadPoolExecutor() as pool:
        repeat = pool.submit(post, front, "/v1/chat/completions", CHAT, KEY)
        front.wait_until(lambda: metrics.detached_answers.value() == 0, "the repeat reads")
        assert front.do(metrics.repeats_answered.value) == before, "its answer has not begun"
        front.do(front.core.release)
        assert repeat.result(60.0).status_code == 200
    assert front.do(metrics.repeats_answered.value) == before + 1


def test_a_stream_that_failed_is_computed_again(front: FrontUnderTest) -> None:
    body = {**CHAT, "stream": True}
    with begin(front, "/v1/chat/completions", body, KEY) as client:
        client.read_until(b"o")
        sequence = front.do(lambda: front.core.submits[0].sequence_id)
        front.do(lambda: front.core.refuse(sequence, "corrupt", "not a number"))
        client.read_until(b"corrupt_logits")
    front.do(front.core.release)
    front.wait_until(lambda: len(front.kept_answers) == 0, "the failed answer is forgotten")
    assert text_in(post(front, "/v1/chat/completions", body, KEY).text) == TEXT


def test_broken_connections_hold_a_quarter_of_the_slots_at_most(front: FrontUnderTest) -> None:
    for number in range(3):
        break_off(front, begin(front, "/v1/chat/completions", CHAT, {"Idempotency-Key": f"key-{number}"}))
    begin(front, "/v1/chat/completions", CHAT, {"Idempotency-Key": "key-3"}).vanish()
    oldest = front.do(lambda: front.core.submits[0].sequence_id)
    front.wait_until(lambda: front.core.aborts == [oldest], "the oldest is aborted")
    assert front.do(lambda: num_detached(front)) == 3


def test_a_client_without_a_name_is_aborted_at_once(front: FrontUnderTest) -> None:
    begin(front, "/v1/chat/completions", CHAT, {}).vanish()
    front.wait_until(lambda: len(front.core.aborts) == 1, "the sequence is aborted")


def test_a_large_answer_is_sent_whole_and_not_kept(front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "MAX_ANSWER_BYTES", 1000)
    front.do(front.core.release)
    answer = post(front, "/v1/chat/completions", {**CHAT, "stream": True}, KEY)
    assert text_in(answer.text) == TEXT
    assert front.do(lambda: len(front.kept_answers)) == 0


def test_a_drain_ends_answers_that_nobody_reads(front: FrontUnderTest) -> None:
    break_off(front, begin(front, "/v1/chat/completions", CHAT, KEY))
    front.do(lambda: front.service.lifecycle.drain(True))
    try:
        front.wait_until(lambda: len(front.core.aborts) == 1, "the sequence is aborted")
    finally:
        front.do(lambda: front.service.lifecycle.drain(False))


def test_an_answer_without_a_reader_is_aborted_after_its_seconds(tmp_path: Path) -> None:
    with running_front(tmp_path, repeat_seconds=0.2) as front:
        front.do(lambda: setattr(front.core, "hold_after", 5))
        break_off(front, begin(front, "/v1/chat/completions", CHAT, KEY))
        front.wait_until(lambda: len(front.core.aborts) == 1, "the sequence is aborted")
        assert front.do(lambda: len(front.kept_answers)) == 0


def test_without_seconds_nothing_is_kept_and_the_seed_still_follows_from_the_key(tmp_path: Path) -> None:
    with running_front(tmp_path, repeat_seconds=0) as front:
        front.do(lambda: setattr(front.core, "hold_after", 5))
        begin(front, "/v1/chat/completions", CHAT, KEY).vanish()
        front.wait_until(lambda: len(front.core.aborts) == 1, "the sequence is aborted")
        front.do(front.core.release)
        front.chat(seed=None)
        ids = [post(front, "/v1/chat/completions", CHAT, KEY).json()["id"] for _ in range(2)]
        seeds = [submit.params.seed for submit in front.do(lambda: front.core.submits)]
        assert ids[0] == ids[1]
        assert seeds[0] == seeds[2] == seeds[3] != seeds[1]


def test_another_server_has_the_same_seed_and_id(front: FrontUnderTest, tmp_path: Path) -> None:
    front.do(front.core.release)
    with running_front(tmp_path, api_keys=("one",)) as other:
        answers = [post(each, "/v1/chat/completions", {**CHAT, "n": 2}, KEY).json() for each in (front, other)]
        seeds = [
            [submit.params.seed for submit in each.do(lambda each=each: each.core.submits)] for each in (front, other)
        ]
        given = post(other, "/v1/chat/completions", {**CHAT, "seed": 3}, {"Idempotency-Key": "new"}).json()
        assert other.do(lambda: other.core.submits)[-1].params.seed == 3
    assert answers[0]["id"] == answers[1]["id"] != given["id"]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]
