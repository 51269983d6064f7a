"""A stand-in for engines: one HTTP server that answers `/status` at the address of each pod, all of them 127.x.y.z.

It speaks the schema of the real one (schemas/status.v1.json) and asks for the same bearer token. It stands in where no
container runs; `make e2e` runs the real engine in real pods.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

ADMIN_PORT = 8001

_MODEL = {
    "name": "stand-in",
    "source": "builtin://smollm2-135m",
    "commit": None,
    "architecture": "LlamaForCausalLM",
    "num_parameters": 134_515_008,
    "dtype": "bfloat16",
    "compute_dtype": "float32",
    "weight_bytes": 269_030_016,
    "max_model_len": 8192,
}


@dataclass(slots=True, kw_only=True)
class Engine:
    """One engine. It serves once it has its ranks, unless a test says otherwise."""

    token: str
    num_ranks: int
    ranks_per_pod: int = 1
    nodes: list[str] = field(default_factory=list)  # of the worker pods that run
    state: str = ""  # a test's word; empty: what the ranks allow
    reason: str = ""
    token_age: float | None = 1.0
    is_silent: bool = False  # closes connections without an answer
    is_draining: bool = False
    in_flight: int = 0
    num_asked: int = 0

    @property
    def said_state(self) -> str:
        return self.state or ("draining" if self.is_draining else "serving" if self._has_ranks else "starting")

    @property
    def is_ready(self) -> bool:
        """Whether the readiness probe of its container would succeed."""
        return not self.is_draining and self.said_state in ("serving", "recovering")

    @property
    def _has_ranks(self) -> bool:
        return len(self.nodes) >= self.num_ranks

    def document(self) -> dict[str, Any]:
        """`/status`, version v1."""
        is_loaded = self._has_ranks and self.said_state != "starting"
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
                {"name": "load", "seconds": 1.0, "done": 0, "total": 0, "unit": "", "finished": is_loaded},
            ],
            "ranks": [_rank(index, node) for index, node in enumerate(self.nodes)],
            "requests": {"in_flight": self.in_flight, "running": self.in_flight, "waiting": 0},
            "kv_cache": {"num_blocks": 64, "num_free_blocks": 64, "block_size": 16, "usage": 0.0},
            "recoveries": [],
            "api_url": "",
        }


class Engines:
    """The server. Lives in one event loop; tests change the engines in it."""

    def __init__(self) -> None:
        self.by_ip: dict[str, Engine] = {}
        self.num_answers = 0
        self._runner = web.ServerRunner(web.Server(self._answer, access_log=None))

    async def start(self) -> None:
        await self._runner.setup()
        # Pods have addresses of this machine's loopback; nothing else is answered.
        await web.TCPSite(self._runner, "0.0.0.0", ADMIN_PORT, reuse_address=True).start()

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        address = request.transport.get_extra_info("sockname")[0]
        engine = self.by_ip.get(address)
        if not address.startswith("127.") or engine is None or engine.is_silent:
            request.transport.abort()
            return web.Response(status=503)
        engine.num_asked += 1
        self.num_answers += 1
        if request.headers.get("Authorization") != f"Bearer {engine.token}":
            return web.json_response({"error": {"message": "wrong token"}}, status=401)
        match request.method, request.path:
            case "GET", "/status":
                return web.json_response(engine.document())
            case "POST" | "DELETE" as method, "/drain":
                engine.is_draining = method == "POST"
                return web.json_response({})
        return web.json_response({"error": {"message": "not found"}}, status=404)


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
