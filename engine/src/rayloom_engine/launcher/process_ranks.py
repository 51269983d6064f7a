"""Executor `mp`: ranks as processes of this machine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from rayloom_engine.models.progress import Progress


class ProcessRanks:
    """Implements RankStarter."""

    def __init__(self, run_dir: Path, core_address: str) -> None:
        self._run_dir = run_dir
        self._core_address = core_address
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # rank -> its running start

    def prepare(self, progress: Progress) -> None:
        """This machine is all there is to find."""

    def start(self, rank: int, incarnation: int) -> None:
        arguments = ["--run-dir", str(self._run_dir), "--core-address", self._core_address, "--rank", str(rank)]
        arguments += ["--incarnation", str(incarnation), "--parent", str(os.getpid())]
        self._processes[rank] = subprocess.Popen(
            [sys.executable, "-P", "-m", "rayloom_engine.rank_process", *arguments], stdin=subprocess.DEVNULL
        )

    def kill(self, rank: int) -> None:
        if rank in self._processes:
            self._processes[rank].kill()

    def wait(self, timeout_s: float) -> list[tuple[int, str]]:
        ends = {rank: os.pidfd_open(process.pid) for rank, process in self._processes.items()}
        try:
            select.select(list(ends.values()), [], [], timeout_s)
        finally:
            for end in ends.values():
                os.close(end)
        ended = []
        for rank, process in list(self._processes.items()):
            if (code := process.poll()) is not None:
                del self._processes[rank]
                ended.append((rank, signal.Signals(-code).name if code < 0 else f"exit code {code}"))
        return ended

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
