"""Sends each request at its arrival time, even if servers are slow, and collects times and cached tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
import uvloop

from rayloom_bench.client import BadAnswer, read_stream, session
from rayloom_bench.endpoint import Endpoint
from rayloom_bench.fleet.arrivals import Arrival
from rayloom_bench.routing.choices import UrlChoice
from rayloom_bench.routing.servers import MODEL_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request with a complete answer."""

    num_prompt: int
    num_cached: int  # tokens of the prompt that the engine had in its prefix cache
    ttft_s: float  # seconds from sending the request to its first token


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedLoad:
    answered: tuple[Answered, ...]
    failures: tuple[str, ...]


def token_ids(arrival: Arrival, vocab_size: int) -> list[int]:
    """Token ids of a prompt, from the middle half of the vocabulary. Equal texts have equal ids."""
    first, last = vocab_size // 4, 3 * vocab_size // 4
    ids: list[int] = []
    for segment in arrival.prompt:
        rng = random.Random(f"text {segment.text}")  # nosec: not for secrets; a string seed is portable
        ids += [rng.randrange(first, last) for _ in range(segment.num_tokens)]
    return ids


def run_load(
    arrivals: Sequence[Arrival],
    choice: UrlChoice,
    vocab_size: int,
    on_ended: Callable[[], object] = lambda: None,
    *,
    num_warm_up: int = 0,
) -> RoutedLoad:
    """Sends all requests and returns when all have ended. `on_ended` is called once for each request.

    The answers of the first `num_warm_up` requests are left out; their failures are not.
    """
    bodies = [_body(arrival, vocab_size) for arrival in arrivals]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(arrivals, bodies, choice, on_ended, num_warm_up))


async def _run(
    arrivals: Sequence[Arrival],
    bodies: Sequence[bytes],
    choice: UrlChoice,
    on_ended: Callable[[], object],
    num_warm_up: int,
) -> RoutedLoad:
    answered: list[Answered] = []
    failures: list[str] = []

    async def send(client: aiohttp.ClientSession, arrival: Arrival, body: bytes, *, counts: bool) -> None:
        await asyncio.sleep(start_s + arrival.at_s - loop.time())
        url = choice.pick()
        try:
            stream = await read_stream(client, f"{url}/v1/completions", body)
            if stream.usage is None or stream.usage.completion_tokens != arrival.num_output:
                raise BadAnswer(f"usage {stream.usage}, {arrival.num_output} output tokens asked for")
            if counts:
                answered.append(
                    Answered(
                        num_prompt=stream.usage.prompt_tokens,
                        num_cached=stream.usage.num_cached,
                        ttft_s=stream.arrivals_s[0] - stream.start_s,
                    )
                )
        except (BadAnswer, aiohttp.ClientError, OSError) as error:
            failures.append(str(error) or type(error).__name__)
        finally:
            choice.ended(url)
        on_ended()

    loop = asyncio.get_running_loop()
    endpoint = Endpoint(base_url="", model_name=MODEL_NAME)
    async with session(endpoint) as client, asyncio.TaskGroup() as requests:
        start_s = loop.time()
        for number, (arrival, body) in enumerate(zip(arrivals, bodies, strict=True)):
            requests.create_task(send(client, arrival, body, counts=number >= num_warm_up))
    return RoutedLoad(answered=tuple(answered), failures=tuple(failures))


def _body(arrival: Arrival, vocab_size: int) -> bytes:
    fields = {
        "model": MODEL_NAME,
        "prompt": token_ids(arrival, vocab_size),
        "max_tokens": arrival.num_output,
        "min_tokens": arrival.num_output,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(fields)
