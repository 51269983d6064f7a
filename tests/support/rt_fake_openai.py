"""A small OpenAI server for tests of the bench: answers every completion with tokens `t0 t1 ...`, or with a fault."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

Fault = str  # "short", "no done", "error event", "no usage", "status", "cut", "not json", "miscounted prompt"


@dataclass
class FakeOpenAI:
    """The settings of the server, and the requests that it has received."""

    faults: dict[int, Fault] = field(default_factory=dict)
    has_tokenize: bool = True
    num_at_once: int = 1  # the server answers only when this number of requests have arrived
    bodies: list[dict] = field(default_factory=list)
    connections: set[tuple[str, int]] = field(default_factory=set)  # addresses of clients that requested a completion
    num_active: int = 0
    most_active: int = 0
    url: str = ""
    _may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.has_tokenize:
            app.router.add_post("/tokenize", self._tokenize)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Two tokens for a word of seven letters or more, one token for every other word."""
        words = (await request.json())["prompt"].split()
        tokens = [token for word in words for token in ([1, 2] if len(word) >= 7 else [1])]
        return web.json_response({"count": len(tokens), "tokens": tokens})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        opening = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        text = {"choices": [{"delta": {"content": "Paris"}}]}
        return await self._send(request, [opening, text], has_done=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = self.faults.get(len(self.bodies))
        self.bodies.append(body)
        self.connections.add(request.transport.get_extra_info("peername"))
        self.num_active += 1
        self.most_active = max(self.most_active, self.num_active)
        try:
            if len(self.bodies) >= self.num_at_once:
                self._may_answer.set()
            await asyncio.wait_for(self._may_answer.wait(), timeout=30)
            return await self._answer(request, body, fault)
        finally:
            self.num_active -= 1

    async def _answer(self, request: web.Request, body: dict, fault: Fault | None) -> web.StreamResponse:
        if fault == "status":
            return web.json_response({"error": {"message": "too much"}}, status=429)
        num_output = body["max_tokens"] - (1 if fault == "short" else 0)
        prompt = body["prompt"]
        num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        events: list[dict | str] = [
            {"choices": [{"index": 0, "text": f" t{i}", "finish_reason": None}]} for i in range(num_output)
        ]
        events[-1]["choices"][0]["finish_reason"] = "length"
        usage = {"prompt_tokens": num_prompt - (fault == "miscounted prompt"), "completion_tokens": num_output}
        if fault == "error event":
            events[1] = {"error": {"message": "the core is gone", "type": "server_error"}}
        if fault == "not json":
            events[1] = "{broken"
        if fault != "no usage":
            events.append({"choices": [], "usage": usage})
        if fault == "cut":
            request.transport.close()
        return await self._send(request, events, has_done=fault != "no done")

    async def _send(self, request: web.Request, events: list, has_done: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": ping\n\n")
        for event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
        if has_done:
            await response.write(b"data: [DONE]\n\n")
        return response


@contextmanager
def running(fake: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """Runs the server on a free port, in a thread with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(coroutine: Callable) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine(), loop).result(timeout=30)

    runner = web.AppRunner(fake.app())
    try:
        call(runner.setup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        call(site.start)
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield fake
    finally:
        call(runner.cleanup)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
