"""A server as a job of processes that find each other by environment variables (executor external)."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from rt_ports import free_ports
from rt_server import START_EVERY_S, RunningServer, is_ready, wait_until


@dataclass
class RunningJob:
    server: RunningServer  # the server: the process of rank 0, or torchrun
    processes: list[subprocess.Popen[bytes]]  # a process for each rank, or torchrun alone


@contextlib.contextmanager
def running_job(
    folder: Path,
    *arguments: str,
    world_size: int = 2,
    with_torchrun: bool = False,
    until: Callable[[RunningJob], bool] = lambda job: is_ready(job.server),
    environs: Sequence[Mapping[str, str]] = (),
    is_rank_0_last: bool = False,
) -> Iterator[RunningJob]:
    """A server of several ranks, started by torchrun or rank by rank. The block begins once `until(job)` is true.

    `environs`: additional environment variables for each rank. `is_rank_0_last`: rank 0, and so the core, starts once
    the other rank waits for the core. Both have an effect only if the ranks are started one by one.
    """
    master_port, _, api_port, admin_port = free_ports(4)  # ranks also use the port after MASTER_PORT
    serve = ["-m", "rayloom_engine", "serve", "--port", str(api_port), "--admin-port", str(admin_port), *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAYLOOM_RANK_TOKEN": secrets.token_hex(32)}
    if with_torchrun:
        run = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size), "--master-port", str(master_port)]
        commands = [([sys.executable, *run, *serve], environment)]
    else:
        job = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": master_port}
        environment |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in job.items()}}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
        own = environs or [{}] * world_size
        commands = [
            ([sys.executable, *serve], {**environment, **rank, **more}) for rank, more in zip(ranks, own, strict=True)
        ]
    log = folder / "job.log"
    with log.open("wb") as stream, httpx.Client(timeout=180.0) as client:
        processes: list[subprocess.Popen[bytes]] = []
        for command, env in reversed(commands):
            if is_rank_0_last and len(processes) == world_size - 1:
                wait_until(lambda: "cannot reach the core" in log.read_text(), 120.0, log.read_text, START_EVERY_S)
            processes.insert(0, subprocess.Popen(command, stdout=stream, stderr=stream, env=env))
        api, admin = (f"http://127.0.0.1:{port}" for port in (api_port, admin_port))
        job = RunningJob(RunningServer(processes[0], api, admin, log, client), processes)
        try:
            wait_until(lambda: until(job), 120.0, lambda: f"job not ready:\n{log.read_text()}", START_EVERY_S)
            yield job
        finally:
            for process in processes:
                process.send_signal(signal.SIGINT)
            try:
                for process in processes:
                    process.wait(60.0)
            finally:
                for process in processes:
                    process.kill()
