"""Starts two real engines with room for a few prefixes, and a gateway in front of them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayloom_bench.server import ServerProcess, free_ports, running_gateway, running_server

START_S = 120.0
MODEL_NAME = "m"
_KEY = "the key of a measurement on one machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedEngines:
    """URLs of the API of running servers. Every prefix cache was empty at the start."""

    gateway_url: str
    engine_urls: tuple[str, ...]


@contextlib.contextmanager
def running_engines(num_engines: int, flags: Sequence[str]) -> Iterator[RoutedEngines]:
    """Starts the engines with these flags of `rayloom-engine serve`, and a gateway. Ends all of them after the block.

    Raises ServerFailed.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rayloom-bench-")))
        key = folder / "key"
        key.write_text(_KEY, encoding="utf-8")
        port, admin_port, *front_ports = free_ports(2 + num_engines)
        engines: list[ServerProcess] = []
        for front_port in front_ports:
            of_gateway = ["--front-host", "127.0.0.1", "--front-port", str(front_port), "--front-key-file", str(key)]
            named = ["--served-model-name", MODEL_NAME]
            engine = stack.enter_context(running_server([*flags, *named, *of_gateway]))
            engine.wait_ready(START_S)
            engines.append(engine)
        gateway = stack.enter_context(
            running_gateway(
                folder, front_ports, model_name=MODEL_NAME, port=port, admin_port=admin_port, timeout_s=START_S
            )
        )
        yield RoutedEngines(gateway_url=gateway.url, engine_urls=tuple(engine.url for engine in engines))
