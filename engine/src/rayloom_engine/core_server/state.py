"""CoreState: the state of the EngineCore ("core"), from which the I/O thread makes the status for the fronts."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from rayloom_engine.common.process import node_name
from rayloom_engine.core.adapter import Adapter, NeededAdapter, ServedAdapter
from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.core_server.ranks.pool import RankPool
from rayloom_engine.protocol.gateway_requests import GatewayRequests
from rayloom_engine.protocol.messages import (
    CoreStatus,
    Draining,
    EngineAdapters,
    NeedAdapters,
    PhaseProgress,
    RankReport,
    ServedModel,
)
from rayloom_engine.worker.adapter_files import AdapterFiles

if TYPE_CHECKING:
    from rayloom_engine.worker.loaded_rank import LoadedRank


@dataclass(slots=True)
class CoreState:
    """The state of the core, from which the I/O thread makes the CoreStatus for fronts.

    The main thread writes the fields, and the I/O thread reads them without a lock. So a field is replaced as a whole,
    and never changed in place.
    """

    epoch: int
    executor: str  # "uni" | "mp" | "ray" | "external"
    hang_seconds: float = 10.0  # hang_seconds of the config
    state: str = "starting"
    lost: str = ""  # while recovering: the lost rank, as "rank N"
    lost_node: str = ""  # while recovering: the node of the lost rank
    message: str = ""
    model_folder: str = ""  # folder of the model's files, once they are found
    model: ServedModel | None = None
    phases: list[PhaseProgress] = field(default_factory=list)
    phase_started: float = 0.0
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    gateway_requests: GatewayRequests = field(default_factory=GatewayRequests)
    rank_phase: str = "start"
    is_draining: bool = False  # written by the I/O thread
    adapters: tuple[ServedAdapter, ...] | None = None  # written by the I/O thread; None until the front reports them
    takes_adapters: bool = True  # takes_adapters of the config
    heartbeat: float = field(default_factory=time.monotonic)
    last_token_at: float | None = None
    pool: RankPool | None = None  # the ranks; None when this process is the only rank
    rank: LoadedRank | None = None  # the loaded rank, if this process is the only rank
    adapter_files: AdapterFiles = field(default_factory=AdapterFiles)  # used if this process is the only rank
    quiet_s: float = 0.0  # seconds since the main thread last made progress or used CPU time
    patience_s: float = 10.0  # seconds without progress after which the plans in flight count as hung

    def set_patience(self, seconds: float) -> None:
        """Sets the number of seconds without progress after which the main thread and the ranks count as hung."""
        self.patience_s = seconds
        if self.pool is not None:
            self.pool.patience_s = seconds

    def mark(self) -> tuple[object, ...]:
        """Returns a value that changes when the main thread runs its loop, checks its ranks or computes half a layer.

        `Stillness` counts each change as progress.
        """
        advance = self.rank.activity.advance if self.rank is not None else 0
        return self.heartbeat, advance, self.pool.checked_at if self.pool is not None else 0.0

    def last_work_age_s(self) -> float | None:
        """Seconds since a rank that computes the present step last finished half of a layer or used CPU time.

        None while no step is computed. The EngineCore detects a hang by the same signs.
        """
        if self.pool is not None:
            return self.pool.quiet_s()
        return self.quiet_s if self.rank_phase == "step" else None

    def serving(self, message: str) -> None:
        """Records that the core serves. Ends the last phase of a start or rebuild."""
        self.end_phase()
        self.message = message
        self.lost = ""
        self.lost_node = ""
        self.rank_phase = "idle"
        self.state = "serving"

    def recovering(self, rank: int, node: str, cause: str, lost_at: float) -> None:
        """Records that a rebuild begins; a later call of `serving` records its end.

        Empties `phases` and begins a new phase, "suspect", whose start is `lost_at`.
        """
        self.message = cause
        self.lost = f"rank {rank}"
        self.lost_node = node
        self.phases = []
        self.begin_phase("suspect", 0, 0, "")
        self.phase_started = lost_at
        self.state = "recovering"

    def failed(self, cause: str) -> None:
        """Records that the core has given up. Ends the phase in which it failed."""
        self.end_phase()
        self.message = cause
        self.state = "failed"

    def begin_phase(self, phase: str, done: int, total: int, unit: str) -> None:
        """Records the progress of `phase`. If another phase was recorded last, ends that phase first."""
        now = time.monotonic()
        self.heartbeat = now
        if not self.phases or self.phases[-1].name != phase:
            self.end_phase()
            self.phase_started = now
            self.phases = [*self.phases, PhaseProgress(name=phase, seconds=0.0, done=done, total=total, unit=unit)]
        else:
            current = PhaseProgress(name=phase, seconds=now - self.phase_started, done=done, total=total, unit=unit)
            self.phases = [*self.phases[:-1], current]

    def end_phase(self) -> None:
        if self.phases and not self.phases[-1].is_finished:
            last = self.phases[-1]
            ended = PhaseProgress(
                name=last.name,
                seconds=time.monotonic() - self.phase_started,
                done=last.total,
                total=last.total,
                unit=last.unit,
                is_finished=True,
            )
            self.phases = [*self.phases[:-1], ended]

    def status(self) -> CoreStatus:
        now = time.monotonic()
        last = self.last_token_at
        return CoreStatus(
            state=self.state,
            epoch=self.epoch,
            executor=self.executor,
            step=self.stats.num_steps,
            last_token_age_s=None if last is None else now - last,
            last_work_age_s=self.last_work_age_s(),
            phases=tuple(self.phases),
            stats=self.stats,
            ranks=self._own_rank(now) if self.pool is None else self.pool.statuses(),
            model_folder=self.model_folder,
            model=self.model,
            message=self.message,
            lost=self.lost,
            lost_node=self.lost_node,
            heartbeat_age_s=now - self.heartbeat,
            is_draining=self.is_draining,
            adapters=self.adapters,
            takes_adapters=self.takes_adapters,
            adapter_reports=self.adapter_files.reports if self.pool is None else self.pool.adapter_reports(),
            gateway_requests=self.gateway_requests,
        )

    def has_reported(self, adapter: Adapter | None) -> bool:
        """True if the front's last list has an adapter with these files. Also true without an adapter."""
        return adapter is None or any(adapter.digest == each.adapter.digest for each in self.adapters or ())

    def set_draining(self, is_draining: bool) -> None:
        """Records whether the engine drains."""
        self.is_draining = is_draining

    def record_front_report(self, message: Draining | EngineAdapters | NeedAdapters) -> None:
        """Records a report of the engine's own front, so that the status repeats the report for gateways.

        NeedAdapters is passed on to the ranks.
        """
        match message:
            case Draining():
                self.set_draining(message.is_draining)
            case EngineAdapters():
                self.adapters = message.adapters
            case NeedAdapters():
                self._need_adapters(message.adapters)

    def _need_adapters(self, adapters: tuple[NeededAdapter, ...]) -> None:
        if self.pool is None:
            self.adapter_files.need(adapters)
        else:
            self.pool.needed_adapters = adapters

    def _own_rank(self, now: float) -> tuple[RankReport, ...]:
        """Returns the report of the only rank, which is this process."""
        return (
            RankReport(
                rank=0,
                node=node_name(),
                host=platform.node(),
                pid=os.getpid(),
                phase=self.rank_phase,
                heartbeat_age_s=now - self.heartbeat,
                step=self.stats.num_steps,
                memory_bytes=psutil.Process().memory_info().rss,
                advance=self.rank.activity.advance if self.rank is not None else 0,
                weight_bytes_read=self.rank.num_bytes_read if self.rank is not None else 0,
            ),
        )
