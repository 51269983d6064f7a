"""`python -m rayloom_engine.launcher`: keeps every rank running, and reports the progress of starts to the core."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

from rayloom_engine.common.process import (
    EXIT_CONFIG,
    EXIT_GIVEN_UP,
    end_with_parent,
    set_up_logging,
    start_pulse,
    write_failure,
)
from rayloom_engine.common.restarts import RestartBudget
from rayloom_engine.config import EngineConfig, load_config
from rayloom_engine.errors import ConfigError, EngineDead
from rayloom_engine.launcher.process_ranks import ProcessRanks
from rayloom_engine.launcher.starter import NO_CORE, RankStarter
from rayloom_engine.protocol.channel import Channel, dial
from rayloom_engine.protocol.ranks import Fence, Greeting, LaunchProgress

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.1  # seconds between checks for fences from the core
_DIAL_SECONDS = 0.2
_AGAIN_SECONDS = 0.5  # seconds before a fenced rank, or a rank that found no core, is started again


class CoreLine:
    """The connection to the EngineCore, which a thread renews when it breaks. `fences`: Fences from the EngineCore."""

    def __init__(self, address: str, token: str) -> None:
        self.fences: deque[Fence] = deque()
        self._address = address
        self._token = token
        self._channel: Channel | None = None
        self._phase: LaunchProgress | None = None
        threading.Thread(target=self._run, name="core-line", daemon=True).start()

    def progress(self, phase: str, done: int, total: int, unit: str) -> None:
        """Reports a phase to the core. If the core is gone, the next core gets the report. Implements Progress."""
        self._phase = LaunchProgress(phase, done, total, unit)
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):  # `_run` sends the phase again once the next core is connected
                channel.send(self._phase)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                channel, _ = dial(self._address, self._token, Greeting(role="launch", proof=""))
                self._channel = channel
                if self._phase is not None:
                    channel.send(self._phase)
                while True:
                    self.fences.append(channel.expect(Fence))
            self._channel = None
            time.sleep(_DIAL_SECONDS)


class Launcher:
    def __init__(self, config: EngineConfig, starter: RankStarter, line: CoreLine, first_incarnation: int) -> None:
        self.is_up = False  # True once there is room for all ranks
        self._config = config
        self._starter = starter
        self._line = line
        self._next_incarnation = first_incarnation
        self._running: dict[int, int] = {}  # rank -> incarnation
        self._due: dict[int, float] = dict.fromkeys(range(config.world_size), 0.0)  # rank -> time of its next start
        self._fenced: set[int] = set()  # ranks killed because of a fence: the core counts these deaths itself
        self._counted: dict[int, int] = {}  # rank -> the last incarnation whose death was counted in the rank's budget
        self._budgets = {rank: RestartBudget(config.restart_budget) for rank in self._due}

    def run(self) -> NoReturn:
        """Runs until the process ends.

        Raises ConfigError if there is no room for the ranks, and EngineDead if a rank keeps dying.
        """
        self._starter.prepare(self._line.progress)
        self.is_up = True
        _end_on_sigterm()  # called again, because Ray has set a handler that only prints a trace
        while True:
            self._start_due()
            for rank, cause in self._starter.wait(_WAIT_SECONDS):
                incarnation = self._running.pop(rank)
                wait: float | None = _AGAIN_SECONDS
                if cause != NO_CORE and rank not in self._fenced:
                    wait = self._budgets[rank].wait_after_death(time.monotonic())
                    self._counted[rank] = incarnation
                self._fenced.discard(rank)
                if wait is None:
                    budget = self._config.restart_budget
                    raise EngineDead(f"rank {rank} ended ({cause}); restart budget of {budget} exhausted")
                logger.warning("rank %d (start %d) ended (%s), starting it again", rank, incarnation, cause)
                self._due[rank] = time.monotonic() + wait
            while self._line.fences:
                fence = self._line.fences.popleft()
                running = self._running.get(fence.rank)
                if running is not None and fence.incarnation in (None, running):
                    self._fenced.add(fence.rank)
                    self._starter.kill(fence.rank)
                elif fence.incarnation is not None and self._counted.get(fence.rank) == fence.incarnation:
                    # The core counts this death, too, and decides whether the engine gives up. So the death is removed
                    # from the launcher's budget.
                    del self._counted[fence.rank]
                    self._budgets[fence.rank].excuse()

    def _start_due(self) -> None:
        now = time.monotonic()
        for rank in [rank for rank, at in self._due.items() if at <= now]:
            del self._due[rank]
            self._running[rank] = self._next_incarnation
            self._starter.start(rank, self._next_incarnation)
            self._next_incarnation += 1
            self._line.progress("start_ranks", len(self._running), self._config.world_size, "ranks")


def _starter(config: EngineConfig, run_dir: Path, address: str, token: str) -> RankStarter:
    if config.executor == "ray":
        from rayloom_engine.launcher.ray_ranks import RayRanks

        return RayRanks(config, run_dir, token, int(address.rpartition(":")[2]))
    return ProcessRanks(config, run_dir, address)


def _end_on_sigterm() -> None:
    """Makes SIGTERM run the `finally` block of `main`, which ends the ranks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rayloom_engine.launcher", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with config.json and token")
    parser.add_argument("--core-address", required=True, help="HOST:PORT of the core's rank port, from this machine")
    parser.add_argument("--start", type=int, required=True, help="number of this start of the launcher, from 1")
    parser.add_argument("--parent", type=int, required=True, help="id of the parent; this process ends with it")
    parser.add_argument("--pulse-fd", type=int, help="pipe to the supervisor, for signs of life")
    args = parser.parse_args()
    end_with_parent(args.parent)
    _end_on_sigterm()
    config = load_config(args.run_dir / "config.json")
    set_up_logging("launcher", config.log_level)
    token = (args.run_dir / "token").read_text().strip()
    starter = _starter(config, args.run_dir, args.core_address, token)
    try:
        # Incarnations of ranks begin at start << 20, above all incarnations of an earlier launcher. The core therefore
        # refuses the ranks of an earlier launcher once newer ranks have attached.
        launcher = Launcher(config, starter, CoreLine(args.core_address, token), args.start << 20)
        start_pulse(args.pulse_fd, lambda: launcher.is_up)
        launcher.run()
    except (ConfigError, EngineDead) as error:
        logger.error("%s", error)
        write_failure(args.run_dir, str(error))
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_GIVEN_UP
    finally:
        starter.close()


if __name__ == "__main__":
    sys.exit(main())
