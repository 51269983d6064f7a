"""Measures one stream for a fixed time, however slow the server is: the tokens that arrived, not whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
import uvloop

from rayloom_bench.client import Prompt, RequestOptions, completion_body, session
from rayloom_bench.endpoint import Endpoint, EndpointError
from rayloom_bench.events import EventSplitter, parse_event
from rayloom_bench.workload import Workload


@dataclass(slots=True, kw_only=True)
class TimedStream:
    """The tokens that arrived within `seconds`: those of complete answers, and those of the last, incomplete answer."""

    seconds: float
    num_tokens: int = 0
    num_answers: int = 0  # number of ended answers

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds


def run_timed_stream(
    endpoint: Endpoint, workload: Workload, prompts: Sequence[Prompt], options: RequestOptions, seconds: float
) -> TimedStream:
    """Sends the prompts one after the other in a cycle, and stops when the time is over.

    Raises EndpointError if the server refuses a request, breaks a stream or ends an answer early.
    """
    bodies = [
        msgspec.json.encode(completion_body(endpoint.model_name, prompt, workload, options)) for prompt in prompts
    ]
    found = TimedStream(seconds=seconds)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_until_time_is_over(endpoint, workload, bodies, found))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EndpointError(f"{endpoint.base_url}: {error or type(error).__name__}") from error
    return found


async def _until_time_is_over(
    endpoint: Endpoint, workload: Workload, bodies: Sequence[bytes], found: TimedStream
) -> None:
    limit = asyncio.timeout(found.seconds)
    try:
        async with limit, session(endpoint, reuses_connections=False) as client:
            while True:
                for body in bodies:
                    await _count_answer(client, f"{endpoint.base_url}/v1/completions", body, workload, found)
    except TimeoutError:
        # `limit.expired()` shows whether the time is over. A clock would be no proof, because timers may fire a little
        # early.
        if not limit.expired():
            raise  # the connection failed; the time is not over


async def _count_answer(
    client: aiohttp.ClientSession, url: str, body: bytes, workload: Workload, found: TimedStream
) -> None:
    """Counts each token as it arrives. At the end of the answer, the server's own count replaces this count."""
    num_before = found.num_tokens
    splitter = EventSplitter()
    async with client.post(url, data=body) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {(await response.text(errors='replace'))[:300]}")
        async for chunk in response.content.iter_any():
            for data in splitter.feed(chunk):
                if not data.startswith(b"{"):
                    continue
                event = parse_event(data)
                if event.error is not None:
                    raise ValueError(f"an error event: {event.error}")
                found.num_tokens += event.has_new_token
                if event.usage is not None and event.usage.completion_tokens == workload.num_output:
                    found.num_tokens = num_before + workload.num_output
                    found.num_answers += 1
    if found.num_tokens != num_before + workload.num_output:
        raise ValueError(f"{found.num_tokens - num_before} output tokens, {workload.num_output} asked for")
