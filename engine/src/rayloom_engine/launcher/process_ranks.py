"""Executor `mp`: ranks as processes of this machine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError
from rayloom_engine.launcher.starter import NO_CORE
from rayloom_engine.models.progress import Progress
from rayloom_engine.worker.machine import visible_devices


class ProcessRanks:
    """Implements RankStarter."""

    def __init__(self, config: EngineConfig, run_dir: Path, core_address: str) -> None:
        self._config = config
        self._run_dir = run_dir
        self._core_address = core_address
        self._devices: list[str] = []  # CUDA devices, one a rank; empty = all compute on the CPU
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # rank -> its running start

    def prepare(self, progress: Progress) -> None:
        """Gives each rank an accelerator of its own, where there are any. Raises ConfigError when they are too few."""
        if self._config.device == "cpu":
            return
        self._devices = visible_devices()
        if 0 < len(self._devices) < self._config.world_size:
            raise ConfigError(
                f"{self._config.parallelism}: {self._config.world_size} ranks need an accelerator each, and this "
                f"machine has {len(self._devices)}; lower one of them, or set device to cpu"
            )

    def start(self, rank: int, incarnation: int) -> None:
        arguments = ["--run-dir", str(self._run_dir), "--core-address", self._core_address, "--rank", str(rank)]
        arguments += ["--incarnation", str(incarnation), "--parent", str(os.getpid())]
        environment = dict(os.environ)
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[rank]
        self._processes[rank] = subprocess.Popen(
            [sys.executable, "-P", "-m", "rayloom_engine.rank_process", *arguments],
            stdin=subprocess.DEVNULL,
            env=environment,
        )

    def kill(self, rank: int) -> None:
        if rank in self._processes:
            self._processes[rank].kill()

    def wait(self, timeout_s: float) -> list[tuple[int, str]]:
        # A process whose end is known already has no descriptor any more, and nothing to wait for.
        has_ended = any(process.poll() is not None for process in self._processes.values())
        ends = {} if has_ended else {rank: os.pidfd_open(process.pid) for rank, process in self._processes.items()}
        try:
            select.select(list(ends.values()), [], [], 0.0 if has_ended else timeout_s)
        finally:
            for end in ends.values():
                os.close(end)
        ended = []
        for rank, process in list(self._processes.items()):
            if (code := process.poll()) is not None:
                del self._processes[rank]
                killed = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                ended.append((rank, NO_CORE if code == 0 else killed))
        return ended

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
