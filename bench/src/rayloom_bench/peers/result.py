"""The results of `bench peers`, which are added while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rayloom_bench.client import Failure
from rayloom_bench.figures import Figures, RequestRecord
from rayloom_bench.limit import MachineRates, ModelCost
from rayloom_bench.peers.answers.agreement import Agreement
from rayloom_bench.peers.neighbour import NeighbourFigures
from rayloom_bench.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about an engine that do not depend on figures."""

    title: str
    shown_command: str


@dataclass(slots=True, kw_only=True)
class Turn:
    """The measurements of one engine between its start and its end, in one round."""

    engine: str
    round_number: int  # counted from 1
    start_to_first_token_s: float
    figures: dict[str, Figures] = field(default_factory=dict)  # workload -> its figures
    records: dict[str, tuple[RequestRecord, ...]] = field(default_factory=dict)  # workload -> its requests
    pss_bytes: Mapping[str, int] = field(default_factory=dict)  # process -> memory after the last workload
    pss_after: dict[str, Mapping[str, int]] = field(default_factory=dict)  # workload -> process -> memory
    neighbour: NeighbourFigures | None = None  # None if not measured
    others_percent: float = 0.0  # share of CPU time that other processes used


@dataclass(slots=True, kw_only=True)
class PeersResult:
    """The results of a run. Mutable: `rounds` adds to it, `comparison` reads it."""

    about: dict[str, object]  # processor, date, versions, settings
    engines: dict[str, EngineFacts]  # name of an engine -> its facts, in the order of the tables
    workloads: tuple[Workload, ...]
    sweeps: tuple[Workload, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    sweep_turns: list[Turn] = field(default_factory=list)
    agreements: dict[str, Agreement] = field(default_factory=dict)  # engine -> its agreement
    failures: list[Failure] = field(default_factory=list)
    rates: MachineRates | None = None  # None until the machine is measured
    cost: ModelCost | None = None

    def turns_of(self, engine: str) -> Iterable[Turn]:
        return (turn for turn in self.turns if turn.engine == engine)
