"""Starts the servers of a measurement: the gateway with its simulated engines, and the proxies with a plain server."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayloom_bench.gateway import aiohttp_proxy, engine, upstream
from rayloom_bench.gateway.text import write_tokenizer
from rayloom_bench.server import ServerProcess, free_ports, running_gateway, running_process, stop_tree
from rayloom_engine import __version__

GATEWAY = "rayloom-engine gateway"
DIRECT = "no proxy"
START_S = 60.0
KEY = "the key of a measurement on one machine"
NGINX_CONF = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream server {{ server 127.0.0.1:{upstream}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://server;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredServer:
    """A running server, or a server that is not installed (`port` 0)."""

    name: str
    version: str
    port: int
    cpu_seconds: Callable[[], float]


@contextlib.contextmanager
def running_servers(num_engines: int, rate: float) -> Iterator[list[MeasuredServer]]:
    """Starts all servers, and ends them and their processes after the block. Raises ServerFailed."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rayloom-bench-")))
        ports = free_ports(num_engines + 5)
        plain, gateway, admin, proxy, nginx, *engines = ports
        plain_server = stack.enter_context(_started(upstream.__name__, f"--port={plain}", f"--rate={rate}"))
        servers = [
            _measured(GATEWAY, __version__, stack.enter_context(_gateway(folder, gateway, admin, engines, rate))),
            _measured(DIRECT, "", plain_server),
        ]
        started = stack.enter_context(
            _started(aiohttp_proxy.__name__, f"--port={proxy}", f"--upstream=http://127.0.0.1:{plain}")
        )
        servers.append(_measured("aiohttp proxy", importlib.metadata.version("aiohttp"), started))
        program = shutil.which("nginx")
        if program is None:
            servers.append(MeasuredServer(name="nginx", version="not installed", port=0, cpu_seconds=float))
        else:
            conf = folder / "nginx.conf"
            conf.write_text(NGINX_CONF.format(folder=folder, upstream=plain, port=nginx), encoding="utf-8")
            command = [program, "-p", str(folder), "-c", str(conf), "-e", "stderr"]
            started = stack.enter_context(_process("nginx", command, nginx, "/ready"))
            servers.append(_measured("nginx", _nginx_version(program), started))
        yield servers


@contextlib.contextmanager
def _gateway(folder: Path, port: int, admin: int, engines: Sequence[int], rate: float) -> Iterator[ServerProcess]:
    model = folder / "model"
    model.mkdir()
    write_tokenizer(model)
    key = folder / "key"
    key.write_text(KEY, encoding="utf-8")
    with contextlib.ExitStack() as stack:
        for number in engines:
            flags = [f"--folder={model}", f"--key={KEY}", f"--port={number}", f"--rate={rate}"]
            process = subprocess.Popen([sys.executable, "-m", engine.__name__, *flags], start_new_session=True)
            stack.callback(stop_tree, process)
        yield stack.enter_context(
            running_gateway(folder, engines, model_name="m", port=port, admin_port=admin, timeout_s=START_S)
        )


@contextlib.contextmanager
def _started(module: str, *flags: str) -> Iterator[ServerProcess]:
    port = int(flags[0].removeprefix("--port="))
    with _process(module, [sys.executable, "-m", module, *flags], port, "/ready") as server:
        yield server


@contextlib.contextmanager
def _process(title: str, command: Sequence[str], port: int, ready_path: str) -> Iterator[ServerProcess]:
    with running_process(title, command, os.environ, port=port, ready_path=ready_path) as server:
        server.wait_ready(START_S)
        yield server


def _measured(name: str, version: str, server: ServerProcess) -> MeasuredServer:
    port = int(server.url.rpartition(":")[2])
    return MeasuredServer(name=name, version=version, port=port, cpu_seconds=server.cpu_seconds)


def _nginx_version(program: str) -> str:
    shown = subprocess.run([program, "-v"], capture_output=True, text=True, check=False).stderr
    return shown.strip().rpartition("/")[2]
