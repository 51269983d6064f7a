"""Simulated engines: one HTTP server that answers `/status` at the address of each pod (`addresses.py`).

Its answers follow the schema of the real engine (schemas/status.v1.json), and it requires the same bearer token. `make
e2e` runs the real engine in real pods.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from simulated_nodes.addresses import PORT, pod_ip_at
from simulated_nodes.gateways import Gateway

_MODEL = {
    "name": "simulated",
    "source": "builtin://smollm2-135m",
    "commit": None,
    "architecture": "LlamaForCausalLM",
    "num_parameters": 134_515_008,
    "dtype": "bfloat16",
    "compute_dtype": "float32",
    "quantization": "none",
    "weight_bytes": 269_030_016,
    "max_model_len": 8192,
}
# The load of an idle engine that computes 1000 prompt tokens a second and has room for 10,000 tokens.
_IDLE = {
    "queued_tokens": 0,
    "running_tokens": 0,
    "max_running_tokens": 10_000,
    "mean_output_tokens": 100.0,
    "prefill_tokens_per_second": 1000.0,
    "decode_tokens_per_second": 100.0,
}
# Upper bounds, in seconds, of the buckets in which the real engine counts the times to the first token.
_EDGES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)


@dataclass(slots=True, kw_only=True)
class Engine:
    """One simulated engine. It serves when its ranks run, unless a test sets another state."""

    token: str
    num_ranks: int
    ranks_per_pod: int = 1
    nodes: list[str] = field(default_factory=list)  # nodes of the running worker pods
    state: str = ""  # state that a test sets; empty: the ranks determine the state
    reason: str = ""
    token_age: float | None = 1.0
    loading: tuple[int, int] = (0, 0)  # loaded bytes of the model, and all bytes; 0: unknown
    is_silent: bool = False  # closes connections without an answer
    is_draining: bool = False
    in_flight: int = 0  # requests that a test adds to the requests of a Traffic
    # Seconds from the beginning of a drain until the requests of `in_flight` end; None: never.
    finish_s: float | None = 0.3
    # load that a test sets; fields that are left out have the values of an idle engine
    load: dict[str, Any] = field(default_factory=dict)
    # name -> folder or place on the hub of LoRA adapters; None: adapters cannot be set
    adapters: dict[str, str] | None = None
    hub_commit: str = ""  # commit that the hub gives to an adapter without a commit
    broken_adapters: dict[str, str] = field(default_factory=dict)  # folder -> why no engine can load it
    num_asked: int = 0
    # Results of the requests of a Traffic.
    first_token_s: float = 0.03
    is_failing: bool = False  # every request ends with an error
    num_running: int = 0
    num_finished: int = 0
    num_failed: int = 0
    first_tokens: list[float] = field(default_factory=list)  # seconds of each request
    # Times by time.monotonic(), for the order of events.
    served_at: float | None = None  # time of the first answer with state "serving"
    drains: list[tuple[float, str]] = field(default_factory=list)  # time and method of each request for /drain
    # how clients could still reach the engine at the last POST /drain
    found_at_drain: tuple[str, ...] = ()

    @property
    def said_state(self) -> str:
        return self.state or ("draining" if self.is_draining else "serving" if self._has_ranks else "starting")

    @property
    def num_in_flight(self) -> int:
        has_ended = (
            self.is_draining
            and self.drains
            and self.finish_s is not None
            and time.monotonic() >= self.drains[-1][0] + self.finish_s
        )
        return self.num_running + (0 if has_ended else self.in_flight)

    @property
    def takes_requests(self) -> bool:
        """True if the engine's front accepts requests. During a recovery, requests wait."""
        return not self.is_silent and self.is_ready

    @property
    def is_ready(self) -> bool:
        """True if the readiness probe of the engine's container would succeed."""
        return not self.is_draining and self.said_state in ("serving", "recovering")

    @property
    def _has_ranks(self) -> bool:
        return len(self.nodes) >= self.num_ranks

    def document(self) -> dict[str, Any]:
        """The answer to `/status`, version v1."""
        is_loaded = self._has_ranks and self.said_state != "starting"
        times = self.first_tokens
        within = {f"{edge:g}": sum(each <= edge for each in times) for edge in _EDGES} | {"+Inf": len(times)}
        return {
            "version": "v1",
            "engine_version": "0.1.0",
            "state": self.said_state,
            "reason": self.reason,
            "executor": "ray",
            "epoch": 1,
            "step": 7,
            "last_token_age_seconds": self.token_age if is_loaded else None,
            "uptime_seconds": 60.0,
            "model": _MODEL if is_loaded else None,
            "startup": [
                {
                    "name": "load",
                    "seconds": 1.0,
                    "done": self.loading[0],
                    "total": self.loading[1],
                    "unit": "bytes" if self.loading[1] else "",
                    "finished": is_loaded,
                },
            ],
            "ranks": [_rank(index, node) for index, node in enumerate(self.nodes)],
            "requests": {
                "in_flight": self.num_in_flight,
                "running": self.num_in_flight,
                "waiting": 0,
                "finished": self.num_finished,
                "failed": self.num_failed,
                "first_token_seconds": within,
            },
            "kv_cache": {"num_blocks": 64, "num_free_blocks": 64, "block_size": 16, "usage": 0.0},
            "load": _IDLE | self.load,
            "adapters": None if self.adapters is None else [self._adapter(*each) for each in self.adapters.items()],
            "adapters_from_hub": True,
            "recoveries": [],
            "api_url": "",
        }

    def _adapter(self, name: str, path: str) -> dict[str, str]:
        problem = self.broken_adapters.get(path, "")
        commit = ""
        if path.startswith("hf://") and not problem:
            commit = path.partition("@")[2] or self.hub_commit
        state = "failed" if problem else "loaded"
        return {"name": name, "path": path, "state": state, "message": problem, "commit": commit}


class Engines:
    """The server of all simulated engines. It runs in one event loop, in which tests also change the engines."""

    def __init__(self) -> None:
        self.by_ip: dict[str, Engine] = {}
        self.gateways: dict[str, Gateway] = {}  # address -> gateway
        self.num_answers = 0
        # Called for each request to drain, with the engine's address, before the answer is sent.
        self.on_drain: Callable[[str], None] = lambda ip: None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        # The server listens on all of 127.0.0.0/8; only addresses of pods get an answer.
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "0.0.0.0", 0, backlog=4096)
        # Operators that this process starts inherit the port.
        os.environ[PORT] = str(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    def answer(self, address: str, method: str, path: str, token: str, body: bytes = b"") -> tuple[int, object] | None:
        """HTTP status and document; None closes the connection without an answer."""
        ip = pod_ip_at(address)
        if (gateway := self.gateways.get(ip)) is not None and (method, path) == ("GET", "/status"):
            gateway.num_asked += 1
            return (200, gateway.document()) if token == f"Bearer {gateway.token}" else (401, {})
        engine = self.by_ip.get(ip)
        if engine is None or engine.is_silent:
            return None
        engine.num_asked += 1
        self.num_answers += 1
        if token != f"Bearer {engine.token}":
            return 401, {"error": {"message": "wrong token"}}
        match method, path:
            case "GET", "/status":
                document = engine.document()
                if engine.served_at is None and document["state"] == "serving":
                    engine.served_at = time.monotonic()
                return 200, document
            case "POST" | "DELETE", "/drain":
                engine.is_draining = method == "POST"
                engine.drains.append((time.monotonic(), method))
                if engine.is_draining:
                    self.on_drain(ip)
                return 200, {}
            case "PUT", "/adapters" if engine.adapters is not None:
                engine.adapters = json.loads(body)["adapters"]
                return 202, {}
        return 404, {"error": {"message": "not found"}}


class _Connection(asyncio.Protocol):
    """One connection with one request. No web framework, because the benchmark would measure its CPU time, too."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The cast is for mypy. isinstance would be False: uvloop's transports are no subclasses of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or self._transport.is_closing():
            return
        first, *lines = head.decode().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if len(body) < int(headers.get("content-length", "0")):
            return
        address = self._transport.get_extra_info("sockname")[0]
        answer = self._engines.answer(address, method, path, headers.get("authorization", ""), body)
        if answer is None:
            self._transport.abort()
            return
        code, document = answer
        content = json.dumps(document).encode()
        said = f"HTTP/1.1 {code} -\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        self._transport.write(f"{said}Connection: close\r\n\r\n".encode() + content)
        self._transport.close()


def _rank(index: int, node: str) -> dict[str, Any]:
    return {
        "rank": index,
        "node": node,
        "host": f"worker-{index}",
        "pid": 100 + index,
        "phase": "idle",
        "heartbeat_age_seconds": 0.1,
        "step": 7,
        "memory_bytes": 1 << 30,
        "advance": 7,
        "communication_seconds": 0.0,
        "weight_bytes_read": 269_030_016,
    }
