"""Sends a workload and checks every answer: status, error events, exact token counts, `[DONE]`. Nothing is retried."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
import uvloop

from rayloom_bench.endpoint import Endpoint
from rayloom_bench.events import DONE, EventSplitter, Usage, parse_event
from rayloom_bench.figures import RequestRecord
from rayloom_bench.workload import LONG_ARRAY, Workload

Prompt = tuple[int, ...] | str

SILENCE_S = 600  # seconds without a byte after which a stream counts as failed; a slow prefill takes far less

FIRST_TOKEN_QUESTION = "What is the capital of France? Answer in one sentence."


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    name: str  # such as "W1 request 7"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a workload's requests, in the order of their index."""

    records: tuple[RequestRecord, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    ignores_eos: bool = True  # False: requests have neither ignore_eos nor min_tokens, for servers that refuse them
    # fields that are added to every body, for one kind of server
    extra_fields: Mapping[str, object] = field(default_factory=dict)
    reuses_connections: bool = True  # False for servers that may close a connection after an answer


class BadAnswer(ValueError):
    """The server's answer is not as requested. The message states the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStream:
    """One stream that ended with `[DONE]`. Times of time.perf_counter, in seconds."""

    start_s: float
    arrivals_s: tuple[float, ...]
    last_s: float
    end_s: float
    usage: Usage | None


def run_workload(
    endpoint: Endpoint,
    workload: Workload,
    prompts: Sequence[Prompt],
    *,
    label: str = "",
    options: RequestOptions | None = None,
    on_finished: Callable[[], object] = lambda: None,
) -> Outcome:
    """Sends the prompts, `workload.concurrency` at a time, and returns when all are answered.

    A failure's name consists of the workload's name and `label`. `on_finished` is called once for each request.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run_workload(endpoint, workload, prompts, label, options or RequestOptions(), on_finished))


def first_chat_token(endpoint: Endpoint) -> float:
    """Sends a short chat request; returns the time.perf_counter at which the first text of its answer arrived.

    Raises ValueError if no text arrives, and OSError or aiohttp.ClientError if the server cannot be reached.
    """
    body = {
        "model": endpoint.model_name,
        "messages": [{"role": "user", "content": FIRST_TOKEN_QUESTION}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }

    async def ask() -> ReadStream:
        async with session(endpoint) as client:
            return await read_stream(client, f"{endpoint.base_url}/v1/chat/completions", body)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ask()).arrivals_s[0]


def completion_body(
    model_name: str, prompt: Prompt, workload: Workload, options: RequestOptions
) -> Mapping[str, object]:
    """The JSON body of one request with the workload's sampling and length: streamed, with the usage at the end."""
    body: dict[str, object] = {
        "model": model_name,
        "prompt": prompt,
        "max_tokens": workload.num_output,
        "temperature": workload.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if workload.top_p < 1:
        body["top_p"] = workload.top_p
    if workload.is_json:
        schema = {"name": "integers", "schema": dict(LONG_ARRAY), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if options.ignores_eos:
        body |= {"min_tokens": workload.num_output, "ignore_eos": True}
    return {**body, **options.extra_fields}


async def _run_workload(
    endpoint: Endpoint,
    workload: Workload,
    prompts: Sequence[Prompt],
    label: str,
    options: RequestOptions,
    on_finished: Callable[[], object],
) -> Outcome:
    # Bodies are encoded before the clock starts, because the time to encode 2048 ids must not count as the server's.
    bodies = [
        msgspec.json.encode(completion_body(endpoint.model_name, prompt, workload, options)) for prompt in prompts
    ]
    records: dict[int, RequestRecord] = {}
    failures: dict[int, Failure] = {}
    waiting = iter(range(len(prompts)))
    url = f"{endpoint.base_url}/v1/completions"

    async def send_in_turn(client: aiohttp.ClientSession) -> None:
        for index in waiting:
            try:
                stream = await read_stream(client, url, bodies[index])
                records[index] = _checked(index, prompts[index], workload.num_output, stream)
            except (BadAnswer, aiohttp.ClientError, OSError) as error:
                name = " ".join(part for part in (workload.name, label, f"request {index}") if part)
                failures[index] = Failure(name=name, reason=str(error) or type(error).__name__)
            on_finished()

    async with session(endpoint, options.reuses_connections) as client, asyncio.TaskGroup() as clients:
        for _ in range(workload.concurrency):
            clients.create_task(send_in_turn(client))
    return Outcome(
        records=tuple(records[index] for index in sorted(records)),
        failures=tuple(failures[index] for index in sorted(failures)),
    )


def session(endpoint: Endpoint, reuses_connections: bool = True) -> aiohttp.ClientSession:
    """A session with the endpoint's headers, any number of connections, and SILENCE_S as its only time limit."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not reuses_connections),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S),
        headers={"Content-Type": "application/json", **endpoint.headers},
    )


async def read_stream(client: aiohttp.ClientSession, url: str, body: bytes | Mapping[str, object]) -> ReadStream:
    """Sends one request and reads its stream to the end. Raises BadAnswer, aiohttp.ClientError or OSError."""
    payload = body if isinstance(body, bytes) else msgspec.json.encode(body)
    arrivals_s: list[float] = []
    last_s = None
    usage = None
    is_done = False
    splitter = EventSplitter()
    start_s = time.perf_counter()
    async with client.post(url, data=payload) as response:
        if response.status != 200:
            text = (await response.text(errors="replace"))[:300]
            raise BadAnswer(f"HTTP {response.status}: {text}")
        async for chunk in response.content.iter_any():
            now = time.perf_counter()
            has_new_token = False
            for data in splitter.feed(chunk):
                if data == DONE:
                    is_done = True
                    continue
                try:
                    event = parse_event(data)
                except ValueError as error:
                    raise BadAnswer(str(error)) from error
                if event.error is not None:
                    raise BadAnswer(f"an error event: {event.error}")
                if event.choices:
                    last_s = now
                has_new_token = has_new_token or event.has_new_token
                usage = event.usage or usage
            # Tokens of one read count as one arrival. Otherwise a client that reads late would measure gaps of zero.
            if has_new_token:
                arrivals_s.append(now)
    end_s = time.perf_counter()
    if not is_done:
        raise BadAnswer("the stream ended without [DONE]")
    if not arrivals_s or last_s is None:
        raise BadAnswer("the stream held no token")
    return ReadStream(start_s=start_s, arrivals_s=tuple(arrivals_s), last_s=last_s, end_s=end_s, usage=usage)


def _checked(index: int, prompt: Prompt, num_output: int, stream: ReadStream) -> RequestRecord:
    """The record of a stream. Raises BadAnswer unless the stream has the requested token counts."""
    usage = stream.usage
    if usage is None:
        raise BadAnswer("no usage in the stream, though stream_options.include_usage was set")
    if usage.completion_tokens != num_output:
        raise BadAnswer(f"{usage.completion_tokens} output tokens, {num_output} asked for")
    if not isinstance(prompt, str) and usage.prompt_tokens != len(prompt):
        raise BadAnswer(f"{usage.prompt_tokens} prompt tokens counted, {len(prompt)} sent")
    return RequestRecord(
        index=index,
        num_prompt=usage.prompt_tokens,
        num_output=usage.completion_tokens,
        start_s=stream.start_s,
        arrivals_s=stream.arrivals_s,
        last_s=stream.last_s,
        end_s=stream.end_s,
    )
