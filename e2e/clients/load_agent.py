"""A load generator that runs in a pod as the text of `python -c`: streams, requests after a fault, a prober.

If the setting `repeat_url` is empty, there are no retries. Otherwise each stream has an Idempotency-Key. When the
connection of a stream breaks, the client sends the request again, to `repeat_url` and with the same key.

stdin has one JSON object per line: first the settings, then {"do": "start_arrivals"} after the fault, and
{"do": "stop"}. stdout gets {"ready": time} when every stream has `strike_at` tokens, and {"ended": time} when no
request runs and none will arrive. At the end it gets the records of all streams and probes. Times are Unix times. The
program that reads stdout compares the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import uuid
from typing import Any

import aiohttp

# The engine sends an SSE comment every 10 s while a stream waits.
SILENCE_S = 25.0
# A Service routes to a killed pod for a few more seconds, and a repeated request may fail in this time. So a client
# repeats at most MOST_REPEATS times, every REPEAT_S seconds.
MOST_REPEATS, REPEAT_S = 40, 0.25

Tasks = set["asyncio.Task[None]"]


class Choice:
    """One choice of a streamed answer, assembled from the answer's events."""

    def __init__(self) -> None:
        self.text = ""
        self.tool = ""  # names and arguments of the tool calls
        self.tokens: list[str] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None

    def take(self, part: dict[str, Any]) -> int:
        """Adds one event's part of this choice (completion or chat). Returns the number of tokens in this part."""
        delta = part.get("delta", {})
        self.text += part.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            self.tool += (call["function"].get("name") or "") + call["function"]["arguments"]
        logprobs = part.get("logprobs") or {}
        content = logprobs.get("content") or []
        tokens = logprobs.get("tokens") or [each["token"] for each in content]
        self.tokens += tokens
        self.logprobs += logprobs.get("token_logprobs") or [each["logprob"] for each in content]
        self.finish_reason = part["finish_reason"] or self.finish_reason
        return len(tokens)


class Stream:
    """One streamed answer. `failure` is empty only if the stream ended as a client expects."""

    def __init__(self, url: str, index: int, request: dict[str, Any], is_late: bool, repeat_url: str) -> None:
        self.url, self.index, self.request, self.is_late = url, index, request, is_late
        self.repeat_url = repeat_url
        self.headers = {"Idempotency-Key": uuid.uuid4().hex} if repeat_url else {}
        self.choices: dict[int, Choice] = {}
        self.warnings: list[str] = []
        self.times: list[float] = []  # arrival time of each token of each choice, over all connections
        self.comments: list[tuple[float, str]] = []
        self.cold_start = ""  # the header X-Rayloom-Cold-Start
        self.served_by = ""  # the header X-Rayloom-Model: the model behind an alias
        self.broken: list[dict[str, Any]] = []  # connections that broke: time, failure and tokens of each choice
        self.is_done = False
        self.is_broken = False
        self.failure = ""
        self.began = time.time()
        self.ended: float | None = None
        self.task: asyncio.Task[None]

    async def run(self, session: aiohttp.ClientSession) -> None:
        try:
            await self._connect(session, self.url)
            while self.is_broken and self.repeat_url and len(self.broken) < MOST_REPEATS:
                tokens = [choice.tokens for _, choice in sorted(self.choices.items())]
                self.broken.append({"at": time.time(), "failure": self.failure, "tokens": tokens})
                self.choices, self.warnings = {}, []
                self.failure, self.is_broken = "", False
                if len(self.broken) > 1:
                    await asyncio.sleep(REPEAT_S)
                await self._connect(session, self.repeat_url)
        finally:
            self.ended = time.time()

    async def _connect(self, session: aiohttp.ClientSession, url: str) -> None:
        body = self.request["body"]
        try:
            async with session.post(f"{url}{self.request['path']}", json=body, headers=self.headers) as answer:
                if answer.status != 200:
                    self.failure = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                    return
                self.cold_start = answer.headers.get("X-Rayloom-Cold-Start", "")
                self.served_by = answer.headers.get("X-Rayloom-Model", "")
                async for line in answer.content:
                    self._take(line.decode().strip())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.failure, self.is_broken = f"{type(error).__name__}: {error}", True
        finally:
            if not self.failure and not self.is_done:
                self.failure, self.is_broken = "the stream ended without [DONE]", True

    def _take(self, line: str) -> None:
        if line.startswith(":"):
            self.comments.append((time.time(), line.removeprefix(":").strip()))
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.is_done = True
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.failure = f"error event: {event['error']}"
            return
        self.warnings += event.get("warnings", [])
        for part in event["choices"]:
            num_tokens = self.choices.setdefault(part["index"], Choice()).take(part)
            self.times += [time.time()] * num_tokens

    def report(self) -> dict[str, Any]:
        choices = [vars(choice) for _, choice in sorted(self.choices.items())]
        return {
            "url": self.url,
            "index": self.index,
            "model": self.request["body"].get("model", ""),
            "served_by": self.served_by,
            "num_tokens": self.request["body"]["max_tokens"],
            "is_late": self.is_late,
            "began": self.began,
            "ended": self.ended,
            "choices": choices,
            "tokens": choices[0]["tokens"] if choices else [],
            "times": self.times,
            "warnings": self.warnings,
            "comments": self.comments,
            "cold_start": self.cold_start,
            "broken": self.broken,
            "failure": self.failure,
        }


class Agent:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.streams: list[Stream] = []
        self.probes: list[tuple[float, float, str]] = []  # sent, answered, failure
        self.had: list[int] = []  # number of tokens of each first stream at the time of the fault
        self.arrivals_start = asyncio.Event()
        self.stop = asyncio.Event()

    async def run(self) -> None:
        asked = self.settings
        tasks: Tasks = set()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE_S)
        # Each request gets a new connection. A kept connection would stay with its pod, even if the Service selects
        # other pods.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            listening = asyncio.create_task(self._listen())
            probing = asyncio.create_task(self._probe(session)) if asked["probe_url"] else None
            first = [self._start(session, tasks, index, url, False) for index, url in enumerate(asked["urls"])]
            running = asyncio.gather(*tasks)
            arriving = asyncio.create_task(self._arrive(session, tasks, running))
            if asked["strike_at"]:
                await self._strike(first, asked["strike_at"])
            await running
            if asked["strike_at"]:
                await arriving
                say({"ended": time.time()})
                await self.stop.wait()
            arriving.cancel()
            await asyncio.gather(arriving, return_exceptions=True)
            await asyncio.gather(*tasks)
            if probing is not None:
                self.stop.set()
                await probing
            listening.cancel()
        say({"streams": [each.report() for each in self.streams], "probes": self.probes, "had": self.had})

    async def _strike(self, first: list[Stream], strike_at: int) -> None:
        while not all(len(each.times) >= strike_at or each.failure for each in first):
            await asyncio.sleep(0.01)
        say({"ready": time.time()})
        await self.arrivals_start.wait()
        self.had = [len(each.times) for each in first]

    async def _arrive(self, session: aiohttp.ClientSession, tasks: Tasks, running: asyncio.Future[Any]) -> None:
        """Sends requests after the fault, by default until `late_for_s` is over and the first streams have ended."""
        asked = self.settings
        await self.arrivals_start.wait()
        if asked.get("arrivals"):
            await self._replay(session, tasks)
            return
        if asked["steady"]:
            await asyncio.gather(*(self._repeat(session, tasks, number) for number in range(asked["steady"])))
            return
        number, until = 0, time.time() + asked["late_for_s"]
        while asked["late_every_s"] and (time.time() < until or not running.done()):
            self._start(session, tasks, number, asked["late_url"], True)
            number += 1
            await asyncio.sleep(asked["late_every_s"])

    async def _replay(self, session: aiohttp.ClientSession, tasks: Tasks) -> None:
        """Sends the requests of `arrivals`, [seconds, index] each, until `stop`.

        Reports its progress every `report_every_s` seconds.
        """
        began, reported = time.time(), 0.0
        for at_s, index in self.settings["arrivals"]:
            while (left_s := began + at_s - time.time()) > 0 and not self.stop.is_set():
                if time.time() - reported > self.settings["report_every_s"]:
                    reported = time.time()
                    self._say_progress()
                await asyncio.sleep(min(left_s, 0.5))
            if self.stop.is_set():
                return
            self._start(session, tasks, index, self.settings["late_url"], True)

    def _say_progress(self) -> None:
        ended = [each for each in self.streams if each.ended is not None]
        failures = [each.failure for each in ended if each.failure]
        repeats = sum(bool(each.broken) for each in self.streams)
        counts = {"sent": len(self.streams), "ended": len(ended), "failed": len(failures), "repeated": repeats}
        say({"progress": {**counts, "last_failure": (failures or [""])[-1]}})

    async def _repeat(self, session: aiohttp.ClientSession, tasks: Tasks, number: int) -> None:
        """Sends one stream after the other until `stop`.

        Streams begin at least `late_every_s` seconds apart. This limits the number of streams that can fail.
        """
        asked = self.settings
        while not self.stop.is_set():
            pause = asyncio.create_task(asyncio.sleep(asked["late_every_s"]))
            stream = self._start(session, tasks, number, asked["late_url"], True)
            await asyncio.gather(pause, stream.task)
            number += asked["steady"]

    def _start(self, session: aiohttp.ClientSession, tasks: Tasks, number: int, url: str, is_late: bool) -> Stream:
        requests = self.settings["late_requests" if is_late else "requests"]
        index = number % len(requests)
        stream = Stream(url, index, requests[index], is_late, self.settings["repeat_url"])
        self.streams.append(stream)
        stream.task = asyncio.create_task(stream.run(session))
        tasks.add(stream.task)
        return stream

    async def _probe(self, session: aiohttp.ClientSession) -> None:
        """Requests one token a second until `stop`. A probe that waits for a recovery does not delay the next probe."""
        probes: set[asyncio.Task[None]] = set()
        while not self.stop.is_set():
            probes.add(asyncio.create_task(self._ask(session)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), 1.0)
        _, unanswered = await asyncio.wait(probes, timeout=self.settings["probe_rest_s"])
        for task in unanswered:
            task.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        sent, failure = time.time(), "no answer until the end"
        content = {"model": self.settings["model"], "prompt": "Hello", "max_tokens": 1, "temperature": 0.0}
        timeout = aiohttp.ClientTimeout(total=self.settings["probe_timeout_s"])
        try:
            url = f"{self.settings['probe_url']}/v1/completions"
            async with session.post(url, json=content, timeout=timeout) as answer:
                if answer.status != 200:
                    failure = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                else:
                    await answer.json()
                    failure = ""
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            self.probes.append((sent, time.time(), failure))

    async def _listen(self) -> None:
        while line := await asyncio.to_thread(sys.stdin.readline):
            {"start_arrivals": self.arrivals_start, "stop": self.stop}[json.loads(line)["do"]].set()


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Agent(json.loads(sys.stdin.readline())).run())
        # The thread that reads stdin would keep this process alive.
        import os

        os._exit(0)
