"""A strict reader of the API's streams: it fails for every irregularity that breaks some client."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

import rt_openai_schema

CONSTANT = ("id", "created", "model", "object", "system_fingerprint")


@dataclass
class StreamedChoice:
    """One choice of a stream, assembled from chunks."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Any] = field(default_factory=list)  # the `logprobs` objects in order
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    num_chunks: int = 0


@dataclass
class Streamed:
    """A whole, well-formed stream."""

    chunks: list[dict[str, Any]]  # all chunks, including the chunk with the usage
    choices: dict[int, StreamedChoice]
    usage: dict[str, Any] | None  # the usage in the last chunk


def read_stream(response: httpx.Response, *, num_choices: int, include_usage: bool = False) -> Streamed:
    """Reads the stream in a complete response. Fails at the first event that breaks a rule.

    The rules: An event is one `data:` line; other lines are comments. `[DONE]` comes once, at the end. Every chunk is
    valid by OpenAI's schema. All chunks have the same id, time, model, object and fingerprint. A chunk has one choice,
    and no index is missing. In chats the role comes once, in the first chunk. Each choice has one finish reason, in its
    last chunk. If the request asks for usage, the last chunk has the usage and no choices, and `usage` is null in all
    other chunks. Otherwise the key `usage` is missing.
    """
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    chunks = _chunks(response.content)
    is_chat = chunks[0]["object"] == "chat.completion.chunk"
    schema = "CreateChatCompletionStreamResponse" if is_chat else rt_openai_schema.COMPLETION_CHUNK
    for chunk in chunks:
        rt_openai_schema.check(schema, chunk)
        for name in CONSTANT:
            assert chunk[name] == chunks[0][name], f"{name} is {chunk[name]!r}, and was {chunks[0][name]!r}"
    usage = _check_usage(chunks, include_usage=include_usage)
    choices: dict[int, StreamedChoice] = {}
    for chunk in chunks[:-1] if include_usage else chunks:
        assert len(chunk["choices"]) == 1, "a chunk has one choice"
        choice = chunk["choices"][0]
        collected = choices.setdefault(choice["index"], StreamedChoice())
        assert collected.finish_reason is None, "a chunk after the last"
        if is_chat:
            _take_delta(choice, collected)
        _take(choice, collected, chunk)
    assert sorted(choices) == list(range(num_choices)), f"choices {sorted(choices)}"
    assert all(choice.finish_reason is not None for choice in choices.values()), "a choice has no finish_reason"
    return Streamed(chunks=chunks, choices=choices, usage=usage)


def _chunks(body: bytes) -> list[dict[str, Any]]:
    assert b"\r" not in body, "lines end in CR"
    events = body.decode().split("\n\n")
    assert events[-1] == "", "the stream ends in the middle of an event"
    events = [event for event in events[:-1] if not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events), "an event is not one data line"
    data = [event.removeprefix("data: ") for event in events]
    assert data.count("[DONE]") == 1, f"[DONE] comes {data.count('[DONE]')} times"
    assert data[-1] == "[DONE]", "an event comes after [DONE]"
    documents = [json.loads(item) for item in data[:-1]]
    assert documents, "no chunk"
    assert not any("error" in document for document in documents), "an error event"
    return documents


def _check_usage(chunks: list[dict[str, Any]], *, include_usage: bool) -> dict[str, Any] | None:
    if not include_usage:
        assert not any("usage" in chunk for chunk in chunks), "usage, and nobody asked for it"
        return None
    assert all("usage" in chunk for chunk in chunks), "a chunk without usage"
    empty = [index for index, chunk in enumerate(chunks) if chunk["choices"] == []]
    assert empty == [len(chunks) - 1], f"chunks without choices: {empty} of {len(chunks)}"
    usage: dict[str, Any] = chunks[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], f"no sum: {usage}"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"] is not None]
    assert counts == sorted(counts), f"usage falls: {counts}"
    if len(counts) > 1:  # with continuous_usage_stats, every chunk has a usage
        assert len(counts) == len(chunks), "usage is in some chunks only"
        assert counts[-2] == counts[-1], f"the last chunk adds tokens: {counts}"
        if "delta" in chunks[0]["choices"][0]:
            assert counts[0] == 0, "the role comes before any token"
    return usage


def _take_delta(choice: dict[str, Any], collected: StreamedChoice) -> None:
    delta = choice["delta"]
    if collected.num_chunks == 0:
        assert delta == {"role": "assistant", "content": ""}, f"the role does not come first: {delta}"
    else:
        assert "role" not in delta, "the role comes again"


def _take(choice: dict[str, Any], collected: StreamedChoice, chunk: dict[str, Any]) -> None:
    collected.num_chunks += 1
    collected.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    collected.finish_reason = choice["finish_reason"]
    collected.stop_reason = choice.get("stop_reason")
    if choice["logprobs"] is not None:
        collected.logprobs.append(choice["logprobs"])
    collected.token_ids += choice.get("token_ids") or []
    prompt = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids")
    if prompt is not None:
        collected.prompt_token_ids = prompt
