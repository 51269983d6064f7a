"""Clients whose connections break repeat their requests to the real server. Tokens are the same, and computed once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rt_lazy import LazyModule
from rt_raw_client import RawClient, streamed_text
from rt_server import RunningServer, wait_until

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

PATH = "/v1/completions"
AUTH = {"Authorization": "Bearer key-for-tests"}
# The answer is sampled without a seed, so that a second computation would differ. It is long enough to be cut off.
BODY = {"prompt": "Once upon a time", "max_tokens": 120, "ignore_eos": True, "stream": True}


def running(server: RunningServer) -> int:
    number: int = server.status()["requests"]["in_flight"]
    return number


def num_prompts(server: RunningServer) -> float:
    """The number of prompt tokens that were submitted since the start of the front."""
    lines = server.client.get(f"{server.api_url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("rayloom:prompt_tokens_total"))


def test_a_stream_that_is_cut_thrice_is_computed_once_and_comes_whole(server: RunningServer) -> None:
    headers = {**AUTH, "Idempotency-Key": "cut-thrice"}
    before = num_prompts(server)
    parts = []
    for _ in range(3):
        client = RawClient(server.api_url, PATH, BODY, headers)
        parts.append(client.read_until(b"\n\n").partition(b"data: ")[2].partition(b"\n\n")[0])
        client.vanish()
    answer = server.client.post(f"{server.api_url}{PATH}", json=BODY, headers=headers)
    assert answer.headers["idempotent-replayed"] == "true"
    text = streamed_text(answer.text)
    assert len(text) > 200
    assert len(set(parts)) == 1, "each began with the same event"
    assert f"data: {parts[0].decode()}\n\n" in answer.text
    assert num_prompts(server) - before == 4, "the prompt's tokens, counted once"
    again = server.client.post(f"{server.api_url}{PATH}", json=BODY, headers=headers)
    assert again.text == answer.text, "a finished answer is kept"


def test_a_whole_answer_is_kept_while_its_client_is_gone(server: RunningServer) -> None:
    headers = {**AUTH, "X-Request-Id": "whole-and-cut"}
    body = {**BODY, "stream": False}
    client = RawClient(server.api_url, PATH, body, headers)
    wait_until(lambda: running(server) == 1, 60.0, lambda: str(server.status()))
    client.vanish()
    wait_until(lambda: running(server) == 0, 120.0, lambda: str(server.status()))
    answer = server.client.post(f"{server.api_url}{PATH}", json=body, headers=headers).json()
    assert answer["id"] == "cmpl-whole-and-cut"
    assert answer["usage"]["completion_tokens"] == BODY["max_tokens"]
    assert running(server) == 0


def test_a_flood_of_broken_clients_leaves_the_engine_to_others(server: RunningServer) -> None:
    for number in range(18):
        body = {**BODY, "max_tokens": 500}
        client = RawClient(server.api_url, PATH, body, {**AUTH, "Idempotency-Key": f"flood-{number}"})
        client.read_until(b"data: ")
        client.vanish()
    wait_until(lambda: running(server) == 16, 60.0, lambda: str(server.status()))
    answer = server.client.post(f"{server.api_url}{PATH}", json={"prompt": "Hi", "max_tokens": 2}, headers=AUTH)
    assert answer.status_code == 200
    # A drain ends detached answers, so the server is idle for the next test.
    server.client.post(f"{server.admin_url}/drain")
    wait_until(lambda: running(server) == 0, 60.0, lambda: str(server.status()))
    server.client.delete(f"{server.admin_url}/drain")


def test_openais_client_repeats_a_stream_with_extra_headers(server: RunningServer) -> None:
    cut = _CutStream()
    headers = {"Idempotency-Key": "openai-client"}
    request: dict[str, Any] = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 100, "stream": True}
    texts = []
    with httpx.Client(transport=cut) as http:
        client = openai.OpenAI(
            base_url=f"{server.api_url}/v1", api_key="key-for-tests", max_retries=0, timeout=120.0, http_client=http
        )
        for _ in range(2):
            texts.append("")
            with contextlib.suppress(openai.APIConnectionError, httpx.TransportError):
                for chunk in client.completions.create(**request, extra_headers=headers):
                    texts[-1] += chunk.choices[0].text
    assert 0 < len(texts[0]) < len(texts[1])
    assert texts[1].startswith(texts[0])


class _CutStream(httpx.HTTPTransport):
    """A transport that breaks the connection of the first answer after 3 parts."""

    def __init__(self) -> None:
        super().__init__()
        self._is_first = True

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if self._is_first:
            self._is_first = False
            response.stream = _Cut(response.stream)
        return response


class _Cut(httpx.SyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Any:
        for number, part in enumerate(self._stream):
            if number == 3:
                raise httpx.ReadError("the connection broke")
            yield part

    def close(self) -> None:
        self._stream.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_chat_is_repeated_on_a_second_connection_while_the_first_reads(server: RunningServer, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 60, "stream": True}
    headers = {**AUTH, "Idempotency-Key": f"two-at-once{path}"}
    with RawClient(server.api_url, path, body, headers) as first:
        first.read_until(b"data: ")
        second = server.client.post(f"{server.api_url}{path}", json=body, headers=headers)
        end = b"[DONE]" if path == "/v1/chat/completions" else b'"message_stop"'
        first.read_until(end)
    events = [line for line in second.text.splitlines() if line.startswith("data: ")]
    assert len(events) > 10
    assert events[0].encode() in first.received, "both begin with the same event, with the same id"
