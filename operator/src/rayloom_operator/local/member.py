"""Member: one of several local processes, and its restarts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rayloom_operator.api.recovery import Recovery
from rayloom_operator.errors import EngineEnded
from rayloom_operator.local.plan import ProcessPlan
from rayloom_operator.local.ports import ReservedPort
from rayloom_operator.local.process import LocalProcess
from rayloom_operator.local.restarts import Restarts


class Member:
    """A process that is started again after its end. Call `start` first. Config and log are in `folder`."""

    def __init__(
        self,
        plan: ProcessPlan,
        ports: Sequence[ReservedPort],
        *,
        command: Path,
        folder: Path,
        environment: Mapping[str, str],
        recovery: Recovery,
    ) -> None:
        self.name = plan.name
        self.place = plan.place
        self.process: LocalProcess | None = None  # None before the first start
        self.start_at: float | None = None  # time of the next start, by time.monotonic; None while the process runs
        # time since which the process serves, by time.monotonic; None while the process does not serve
        self.served_at: float | None = None
        self.last_end: EngineEnded | None = None
        self.restarts = Restarts(recovery)
        self._ports = ports
        self._environment = {**environment, **plan.environment}
        self._log_path = folder / f"{plan.name}.log"
        config_path = folder / f"{plan.name}.json"
        config_path.write_text(json.dumps(plan.document, indent=2) + "\n", encoding="utf-8")
        self._arguments = (str(command), plan.command, "--config", str(config_path))

    def start(self) -> None:
        """Starts the process. Raises EngineUnavailable."""
        self.process = LocalProcess(self.name, self._arguments, self._log_path, self._environment)
        self.start_at = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and not self.process.has_exited

    @property
    def is_lost(self) -> bool:
        """True if the process does not serve, and has ended more often than the restart budget allows."""
        return self.served_at is None and self.restarts.is_spent

    def is_due(self, now: float) -> bool:
        """True if the process must be started now: its back-off is over, and its ports are free.

        Children of a killed engine may hold the engine's ports for a moment.
        """
        return self.start_at is not None and self.start_at <= now and all(port.is_free() for port in self._ports)

    def reap(self, now: float) -> EngineEnded | None:
        """Returns how the process ended, once per end, and plans the next start; None if the process runs."""
        if self.process is None or self.start_at is not None or not self.process.has_exited:
            return None
        self.last_end = self.process.wait("while serving" if self.served_at is not None else "before it served")
        self.process.stop(0.0)  # kills the remaining processes of its group
        served_s = 0.0 if self.served_at is None else now - self.served_at
        self.served_at = None
        self.start_at = now + self.restarts.ended(served_s)
        return self.last_end
