"""A simulated service with faults, for tests of the rollout planner.

`reconcile` carries out the planner's step, and asserts the planner's invariants at every change. It converts the stored
state to JSON and back.
"""

from dataclasses import dataclass, replace

from rayloom_operator.api.rollout.spec import Rollout
from rayloom_operator.api.rollout.state import RequestCounts
from rayloom_operator.api.rollout.stored import RolloutStatus
from rayloom_operator.cli.simulation import BEGIN, SimulatedEngine, SimulatedService, actions
from rayloom_operator.decide.rollout.inputs import Desired
from rayloom_operator.decide.rollout.planner import next_step

START_S = 15
# The first letter of a revision determines the fault of its engines. Engines of revisions with other letters work.
FAILS_LATE, SLOW, CRASHES, FAILS_REQUESTS, NEVER_STARTS = "vwxyz"
FOUND_AFTER_S = 30  # seconds until gateways find an engine of FAILS_LATE; from then on its requests fail

__all__ = [
    "BEGIN",
    "CRASHES",
    "FAILS_LATE",
    "FAILS_REQUESTS",
    "NEVER_STARTS",
    "SLOW",
    "Rolling",
    "Running",
    "make_desired",
]


def make_desired(revision="a", replicas=1, drain_seconds=10, is_behind_gateways=False, **rollout):
    analysis = {"holdSeconds": 20, "minRequests": 10} | rollout.pop("analysis", {})
    given = {"progressDeadlineSeconds": 120, "analysis": analysis} | rollout
    return Desired(
        revision=revision,
        replicas=replicas,
        drain_seconds=drain_seconds,
        rollout=Rollout.model_validate(given),
        is_behind_gateways=is_behind_gateways,
    )


@dataclass
class Running(SimulatedEngine):
    """An engine that may be broken."""

    start_s: int = START_S
    is_placed: bool = False
    is_short: bool = False  # no node has room for the engine
    ill_s: int = 0
    is_cordoned: bool = False
    is_tolerant: bool = False
    has_stuck_streams: bool = False  # the engine's requests never end

    @property
    def counts(self):
        if self.revision.startswith(FAILS_LATE):
            number = 2 * max(0, self.served_s - FOUND_AFTER_S)
            return RequestCounts(requests=number, errors=number)
        if self.revision.startswith(FAILS_REQUESTS):
            return RequestCounts(requests=2 * self.served_s, errors=2 * self.served_s)
        if self.revision.startswith(SLOW):
            number = self.served_s // 3
            return RequestCounts(requests=number, first_token_seconds={"0.25": 0, "1": 0, "2.5": number})
        return super().counts

    @property
    def has_crashed(self):
        return self.revision.startswith(CRASHES) and self.age_s >= START_S

    @property
    def state(self):
        if not self.is_placed:
            return "unschedulable" if self.is_short else "pending"
        if self.age_s < START_S or self.revision.startswith(NEVER_STARTS):
            return "starting"
        if self.has_crashed:
            return "pending"
        if self.ill_s:
            return "ill"
        return "draining" if self.is_drained else "well"

    def replica(self):
        return replace(super().replica(), is_cordoned=self.is_cordoned, is_tolerant=self.is_tolerant)

    def pass_time(self, seconds):
        self.ill_s = max(0, self.ill_s - seconds)
        super().pass_time(seconds)

    def finish_requests(self, seconds):
        if not self.has_stuck_streams and not self.ill_s:
            super().finish_requests(seconds)


class Rolling(SimulatedService):
    def __init__(self, desired=None, capacity=99):
        super().__init__(desired or make_desired())
        self.capacity = capacity
        self.has_stuck_streams, self.knows_nodes = False, True
        self.acts = []  # changes of the last reconcile, in their order
        self.step = None
        self.least_ready = 0  # minAvailable of the PodDisruptionBudget that the last reconcile wrote
        self.evicted = []  # (name of an evicted engine, number of available engines after that)

    def new_engine(self, name, revision):
        return Running(name, revision)

    def name_of(self, revision, number):
        return f"{revision}-{number}"

    def revisions(self):
        return "".join(sorted(each.revision for each in self.running))

    def num_available(self):
        return sum(each.is_available for each in self.running)

    def view(self):
        crashed = [each for each in self.running if each.has_crashed and each.revision == self.desired.revision]
        return replace(
            super().view(), num_crashes=len(crashed), cause="It ended with code 1.", knows_nodes=self.knows_nodes
        )

    def pass_time(self, seconds):
        num_placed = sum(each.is_placed for each in self.engines.values())
        for each in self.engines.values():
            if not each.is_placed and num_placed < self.capacity:
                each.is_placed, num_placed = True, num_placed + 1
            each.is_short = not each.is_placed
            each.has_stuck_streams = self.has_stuck_streams
        super().pass_time(seconds)

    def evict(self):
        """Tries to evict engines on cordoned nodes, like `kubectl drain` every 5 s. Unready pods are always evicted."""
        for each in self.running:
            num_ready = sum(other.state == "well" for other in self.running)
            if each.is_cordoned and (each.state != "well" or num_ready > self.least_ready):
                self.end(each)
                self.evicted.append((each.name, self.num_available()))

    def end(self, engine):
        """Deletes an engine, as any user may."""
        self.delete(engine.name)

    def reconcile(self, num_acts=None):
        """Runs a reconcile.

        `num_acts`: number of changes after which the operator dies, before it writes the status.
        """
        written = RolloutStatus.of(self.stored).model_dump_json(by_alias=True, exclude_none=True)
        stored = RolloutStatus.model_validate_json(written).state()
        assert stored == self.stored
        self.step = step = next_step(self.desired, stored, self.view(), self.wall)
        acts = list(actions(step))
        assert not acts or step.state == stored, "acts on a state that is not written"
        for act in acts[:num_acts]:
            self.act(act)
        if num_acts is None:
            self.stored, self.acts = step.state, acts
            desired = self.desired
            free = desired.replicas // 2 if desired.rollout.max_surge else desired.min_available
            num_held = max(desired.replicas, len(self.engines)) - step.num_evictable
            self.least_ready = num_held if step.holds_evictions else free
        return step

    def run(self, seconds, each_s=1):
        """Advances the time by `seconds`. Reconciles every `each_s` seconds, and again while the state changes."""
        for _ in range(0, seconds, each_s):
            self.pass_time(each_s)
            self.settle()

    def settle(self):
        """Reconciles until the state no longer changes. Returns True if time alone may change it later."""
        for _ in range(9):
            if (requeue_after_s := self.reconcile().requeue_after_s) != 0.0:
                return requeue_after_s is not None
        raise AssertionError(f"decides without end: {self.stored}")

    def act(self, action):
        verb, name = action
        getattr(self, f"_check_{verb}")(name)
        if verb != "drain" or not self.engines[name].ill_s:
            super().act(action)

    def _check_make(self, revision):
        assert len(self.engines) < self.desired.max_engines, "more engines than replicas + maxSurge"
        num_there = sum(each.revision == revision for each in self.running)
        assert num_there < self.stored.counts.get(revision, 0), f"one more engine of {revision} than is written"
        failure, is_automatic = self.stored.failure, self.desired.rollout.auto_rollback
        assert failure is None or revision != failure.revision or not is_automatic, (
            f"the failed revision {revision} is tried again"
        )

    def _check_route_on(self, name):
        assert self.engines[name].state == "well", "a route to an engine that made no token"

    def _check_route_off(self, name):
        each, stored = self.engines[name], self.stored
        assert name in stored.terminating or stored.failure is not None, f"the termination of {name} is not written"
        if each.is_available:
            assert self.num_available() > self.desired.min_available, f"too few serve without {name}"
            self._check_old_is_untouched(each)

    def _check_old_is_untouched(self, each):
        num_old = sum(other.revision == each.revision for other in self.running)
        is_surplus = num_old > self.desired.replicas or not self.desired.rollout.max_surge
        if each.revision == self.stored.current_revision and not is_surplus:
            assert self.stored.is_promoted, f"{each.name} is terminated before the new revision has proven itself"

    def _check_drain(self, name):
        each = self.engines[name]
        assert not each.is_routed and not each.is_listed, f"{name} drains while clients find it"

    def _check_undrain(self, name):
        assert name not in self.stored.terminating, f"{name} is taken back while its termination is written"

    def _check_delete(self, name):
        each = self.engines[name]
        assert name in self.stored.terminating, f"the termination of {name} is not written"
        assert not each.is_routed and not each.is_listed, f"{name} is deleted while clients find it"
        if each.state in ("well", "ill", "draining"):
            is_over = each.unlisted_s >= self.desired.drain_seconds
            assert (each.is_drained and each.num_in_flight == 0) or is_over, f"{name} has requests"

    def ask(self, **changes):
        """Edits the spec: revision, replicas, or settings of `rollout`."""
        rollout = {name: changes.pop(name) for name in list(changes) if name not in ("revision", "replicas")}
        settings = self.desired.rollout.model_copy(update=rollout)
        self.desired = replace(self.desired, rollout=settings, **changes)
