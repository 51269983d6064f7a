"""The records of the load generator's prober and streams, against a simulated server."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from clients import load_agent

_CHOICE = {"index": 0, "text": "ab", "logprobs": {"tokens": ["a", "b"]}, "finish_reason": "length"}
_TOKENS = f"data: {json.dumps({'choices': [_CHOICE]})}\n\ndata: [DONE]\n\n"


async def _probes(answers_from: str, rest_s: float) -> list[Any]:
    """Records of probes to a server that answers them only after `stop`, or never."""
    may_answer, asked = asyncio.Event(), asyncio.Event()

    async def complete(request: web.Request) -> web.Response:
        if (await request.json()).get("stream"):
            await asked.wait()
            return web.Response(text=_TOKENS)
        asked.set()
        await may_answer.wait()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    settings = {
        "model": "m",
        "urls": [url],
        "requests": [{"path": "/v1/completions", "body": {"max_tokens": 2, "stream": True}}],
        "late_requests": [],
        "strike_at": 1,
        "late_every_s": 0,
        "late_for_s": 0,
        "steady": 0,
        "repeat_url": "",
        "probe_url": url,
        "probe_timeout_s": 60,
        "probe_rest_s": rest_s,
    }
    pipe = asyncio.subprocess.PIPE
    agent = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(load_agent.__file__)), stdin=pipe, stdout=pipe
    )
    assert agent.stdin is not None and agent.stdout is not None

    async def receive(what: str) -> Any:
        return json.loads(await agent.stdout.readline())[what]

    try:
        agent.stdin.write(json.dumps(settings).encode() + b"\n")
        await receive("ready")
        agent.stdin.write(b'{"do": "start_arrivals"}\n')
        await receive("ended")
        agent.stdin.write(b'{"do": "stop"}\n')
        if answers_from == "stop":
            may_answer.set()
        return await receive("probes")
    finally:
        agent.kill()
        await agent.wait()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("answers_from", "rest_s", "failures"), [("never", 0.1, {"no answer until the end"}), ("stop", 30, {""})]
)
def test_a_probe_that_waits_at_the_end_counts_by_what_becomes_of_it(
    answers_from: str, rest_s: float, failures: set[str]
) -> None:
    probes = asyncio.run(asyncio.wait_for(_probes(answers_from, rest_s), 60))
    assert {failure for _, _, failure in probes} == failures


async def _repeated(num_breaks: int, repeats: bool) -> tuple[load_agent.Stream, list[str | None]]:
    """A stream whose first connections break after two tokens, and the Idempotency-Key of each request."""
    keys: list[str | None] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        keys.append(request.headers.get("Idempotency-Key"))
        if len(keys) > num_breaks:
            return web.Response(text=_TOKENS)
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(_TOKENS.partition("data: [DONE]")[0].encode())
        assert request.transport is not None
        request.transport.abort()
        return answer

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    request = {"path": "/v1/completions", "body": {"max_tokens": 2, "stream": True}}
    stream = load_agent.Stream(url, 0, request, False, url if repeats else "")
    try:
        async with aiohttp.ClientSession() as session:
            await stream.run(session)
    finally:
        await runner.cleanup()
    return stream, keys


def test_a_client_repeats_a_broken_connection_with_its_key_until_the_answer_is_whole() -> None:
    stream, keys = asyncio.run(_repeated(2, repeats=True))
    assert (stream.failure, stream.is_done) == ("", True)
    assert len(keys) == 3 and len(set(keys)) == 1 and keys[0]
    assert [each["tokens"] for each in stream.broken] == [[["a", "b"]]] * 2
    assert stream.report()["tokens"] == ["a", "b"]


def test_a_client_that_does_not_repeat_reports_the_broken_connection() -> None:
    stream, keys = asyncio.run(_repeated(1, repeats=False))
    assert stream.failure and not stream.is_done
    assert keys == [None]
