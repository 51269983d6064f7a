"""The results of one run, which are added while it lasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayloom_bench.client import Failure
from rayloom_bench.figures import Figures, RequestRecord
from rayloom_bench.limit import MachineRates, ModelCost
from rayloom_bench.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one engine for one workload."""

    engine: str
    figures: Figures
    records: tuple[RequestRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Seconds from starting the process to the first streamed token of a short chat."""

    first_s: float  # seconds of the first start, which may include a download and a conversion
    second_s: float
    phases: Mapping[str, float]  # seconds of the second start's phases, which may overlap
    cpu_s: Mapping[str, float] = field(default_factory=dict)  # process -> CPU seconds from its start to the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Proportional set size of all processes of the server."""

    after: str  # name of the workload after which the memory was read
    pss_bytes: Mapping[str, int]  # process -> bytes

    @property
    def total_bytes(self) -> int:
        return sum(self.pss_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Facts about a peer that do not depend on a workload's figures."""

    load_s: float
    version: str
    pss_bytes: Mapping[str, int]  # workload -> memory of the peer's only process after this workload


@dataclass(slots=True, kw_only=True)
class RunResult:
    """The results of a run. Mutable: `sequence` adds to it, `report` reads it."""

    about: dict[str, object]  # processor, versions, seed, settings
    workloads: tuple[Workload, ...]
    ours: str = ""  # name of the engine with which the other engines are compared
    measured: dict[str, list[Measured]] = field(default_factory=dict)  # workload name -> engines, in order of running
    failures: list[Failure] = field(default_factory=list)
    peers: dict[str, Peer] = field(default_factory=dict)  # engine -> its figures
    start_up: StartUp | None = None  # None, like `memory`, for a server that the bench did not start
    memory: Memory | None = None
    others_percent: dict[str, float] = field(
        default_factory=dict
    )  # engine -> percentage of CPU time of other processes
    rates: MachineRates | None = None  # None when the machine was not measured
    cost: ModelCost | None = None  # None if the model is unknown

    def add(self, workload: Workload, measured: Measured) -> None:
        self.measured.setdefault(workload.name, []).append(measured)

    def ours_tok_s(self, workload: Workload) -> float | None:
        """Output tokens per second of the engine `ours`, or None if it has no figures."""
        for measured in self.measured.get(workload.name, ()):
            if measured.engine == self.ours:
                return measured.figures.output_tok_s
        return None
