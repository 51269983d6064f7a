"""The planner's input: the settings of the spec, and the existing engine replicas. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rayloom_operator.api.rollout.spec import Rollout
from rayloom_operator.api.rollout.state import RequestCounts, RolloutState

EngineState: TypeAlias = Literal[
    "pending",  # no engine process runs: the container has not started yet, or has ended
    "unschedulable",  # pending, because no node has room for one of the engine's pods
    "starting",  # the engine has not served yet
    "well",  # a token passed through every rank a moment ago
    "ill",  # the engine has served before and does not serve now; it may hold requests
    "draining",  # the engine accepts no new requests
]
# An engine in one of these states has no requests.
IDLE: tuple[EngineState, ...] = ("pending", "unschedulable", "starting")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """An engine replica as the planner sees it, made from an `observed.EngineReplica`."""

    name: str
    revision: str
    state: EngineState
    is_routed: bool = False  # the engine's head pod carries the route label
    is_listed: bool = False  # an EndpointSlice of the service has the engine's address
    is_cordoned: bool = False  # one of the engine's pods is on a cordoned node, and does not tolerate the cordon
    is_tolerant: bool = (
        False  # one of the pods is on a cordoned node and tolerates the cordon, so moving the engine is of no use
    )
    num_in_flight: int = 0  # number of unfinished requests or sequences, including those that gateways sent
    counts: RequestCounts = field(default_factory=RequestCounts)

    @property
    def is_available(self) -> bool:
        """Returns whether the engine generates tokens, and the Service sends it requests."""
        return self.state == "well" and self.is_routed and self.is_listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The part of the spec that the planner uses."""

    revision: str
    replicas: int
    drain_seconds: int
    rollout: Rollout
    is_behind_gateways: bool = False  # the service has gateways, which find a new engine later than the Service does

    @property
    def max_engines(self) -> int:
        """The number of engines that may exist at once."""
        return self.replicas + self.rollout.max_surge

    @property
    def min_available(self) -> int:
        """Number of engines to keep available: the planner terminates an available engine only if this many remain."""
        return max(0, self.replicas - self.rollout.max_unavailable)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The engine replicas of a service that exist."""

    engines: tuple[ReplicaView, ...] = ()
    num_ending: int = 0  # RayClusters that are being deleted; they hold their nodes until they are gone
    # The number of failures of the spec's revision. Two kinds are not counted: failures caused by a node, and failures
    # of engines that have served for 10 minutes since.
    num_crashes: int = 0
    cause: str = ""  # the first of these failures, as a sentence
    knows_nodes: bool = True  # the operator may read nodes, so it knows which nodes are cordoned

    def of(self, revision: str) -> list[ReplicaView]:
        """Returns the engines of a revision."""
        return [engine for engine in self.engines if engine.revision == revision]

    def num_available(self, revision: str) -> int:
        """Returns the number of available engines of a revision."""
        return sum(engine.is_available for engine in self.of(revision))


def target_revision(desired: Desired, state: RolloutState) -> str:
    """Returns the revision that all engines should have in the end."""
    is_rolled_back = state.failure is not None and desired.rollout.auto_rollback
    return state.current_revision if is_rolled_back else state.update_revision


def is_stopped(desired: Desired, state: RolloutState) -> bool:
    """Returns True while a rollout is paused or halted. A rollback to the current revision is never stopped."""
    is_rolling = target_revision(desired, state) != state.current_revision
    return is_rolling and (desired.rollout.paused or state.failure is not None)


def room(desired: Desired, view: View) -> int:
    """Returns how many more engines may be created now; negative if there are too many."""
    return desired.max_engines - len(view.engines) - view.num_ending
