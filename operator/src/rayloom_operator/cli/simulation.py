"""A simulated service for the rollout planner. Its engines start, serve, drain and are deleted without failures.

`rayloom-operator plan --rollout` uses this service to print the planner's steps. Tests of the planner add failures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Literal, TypeAlias

from rayloom_operator.api.rollout.state import RequestCounts, RolloutState
from rayloom_operator.decide.rollout.inputs import Desired, EngineState, ReplicaView, View
from rayloom_operator.decide.rollout.planner import Step, next_step
from rayloom_operator.names import group_name

BEGIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_NUM_REQUESTS = 3  # requests in flight in an available engine; a draining engine finishes one each second
_DELETION_S = 5

Verb: TypeAlias = Literal["undrain", "route_on", "make", "route_off", "drain", "delete"]
# A verb and its object: a revision for `make`, the name of an engine for all other verbs.
Action: TypeAlias = tuple[Verb, str]


@dataclass
class SimulatedEngine:
    name: str
    revision: str
    start_s: int = 1  # seconds from the scheduling of the engine's pods until the engine serves
    is_placed: bool = True  # the engine's pods are scheduled
    age_s: int = 0  # seconds since the engine's pods were scheduled
    is_routed: bool = False
    is_listed: bool = False
    is_drained: bool = False  # the engine was asked to drain
    unlisted_s: int = 0  # seconds since the engine was last routed or listed in an EndpointSlice
    num_in_flight: int = 0
    served_s: int = 0  # seconds for which the engine was available so far
    ends_s: int | None = None  # seconds until the deletion is complete; None if the engine is not being deleted

    @property
    def state(self) -> EngineState:
        if self.age_s < self.start_s:
            return "starting"
        return "draining" if self.is_drained else "well"

    @property
    def is_available(self) -> bool:
        return self.state == "well" and self.is_routed and self.is_listed

    @property
    def counts(self) -> RequestCounts:
        """The request counts: two requests for each second of availability. No request fails.

        Each request gets its first token at once.
        """
        number = 2 * self.served_s
        return RequestCounts(requests=number, first_token_seconds=dict.fromkeys(("0.25", "1", "2.5"), number))

    def replica(self) -> ReplicaView:
        """Returns the engine as the planner sees it."""
        return ReplicaView(
            name=self.name,
            revision=self.revision,
            state=self.state,
            is_routed=self.is_routed,
            is_listed=self.is_listed,
            num_in_flight=self.num_in_flight,
            counts=self.counts,
        )

    def pass_time(self, seconds: int) -> None:
        if self.is_placed:
            self.age_s += seconds
        self.unlisted_s = 0 if self.is_routed or self.is_listed else self.unlisted_s + seconds
        if self.is_available:
            self.num_in_flight = _NUM_REQUESTS
            self.served_s += seconds
        else:
            self.finish_requests(seconds)
        self.is_listed = self.is_routed and self.state == "well"

    def finish_requests(self, seconds: int) -> None:
        self.num_in_flight = max(0, self.num_in_flight - seconds)


class SimulatedService:
    """A simulated service with the spec `desired`. `stored`: the rollout state that the last reconcile has stored."""

    def __init__(self, desired: Desired, name: str = "chat") -> None:
        self.desired = desired
        self.name = name
        self.stored = RolloutState()
        self.seconds = 0
        self.engines: dict[str, SimulatedEngine] = {}

    @property
    def wall(self) -> datetime:
        return BEGIN + timedelta(seconds=self.seconds)

    @property
    def running(self) -> list[SimulatedEngine]:
        """The engines that are not being deleted."""
        return [engine for engine in self.engines.values() if engine.ends_s is None]

    def new_engine(self, name: str, revision: str) -> SimulatedEngine:
        return SimulatedEngine(name=name, revision=revision)

    def name_of(self, revision: str, number: int) -> str:
        return group_name(self.name, revision, number)

    def view(self) -> View:
        running = self.running
        return View(engines=tuple(engine.replica() for engine in running), num_ending=len(self.engines) - len(running))

    def pass_time(self, seconds: int) -> None:
        """Advances the time by `seconds` in one jump, without reconciles in between."""
        self.seconds += seconds
        for engine in list(self.engines.values()):
            if engine.ends_s is None:
                engine.pass_time(seconds)
                continue
            engine.ends_s -= seconds
            if engine.ends_s <= 0:
                del self.engines[engine.name]

    def reconcile(self) -> Step:
        """Calls the planner, carries out the planned step, stores the planner's state, and returns the step."""
        step = next_step(self.desired, self.stored, self.view(), self.wall)
        for action in actions(step):
            self.act(action)
        self.stored = step.state
        return step

    def act(self, action: Action) -> None:
        verb, name = action
        if verb == "make":
            self.make(name)
        elif verb == "delete":
            self.delete(name)
        elif verb in ("route_on", "route_off"):
            self.engines[name].is_routed = verb == "route_on"
        else:
            self.engines[name].is_drained = verb == "drain"

    def make(self, revision: str) -> None:
        name = next(name for each in count() if (name := self.name_of(revision, each)) not in self.engines)
        self.engines[name] = self.new_engine(name, revision)

    def delete(self, name: str) -> None:
        engine = self.engines[name]
        engine.ends_s = _DELETION_S
        engine.is_routed = False
        engine.is_listed = False


def actions(step: Step) -> Iterator[Action]:
    """Yields the actions of a step, in the order in which they are carried out."""
    yield from (("undrain", name) for name in step.undrain)
    yield from (("route_on", name) for name in step.route_on)
    yield from (("make", revision) for revision, number in step.make.items() for _ in range(number))
    yield from (("route_off", name) for name in step.route_off)
    yield from (("drain", name) for name in step.drain)
    yield from (("delete", name) for name in step.delete)
