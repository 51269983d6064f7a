"""A service's engines in a few lines, for the rollout planner: they start, serve, count requests, drain and end.

`turn` lets the planner act and asserts with every act what must hold in each. What is remembered goes through JSON.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from rayloom_operator.api.rollout import Figures, Rollout, RolloutState
from rayloom_operator.decide.rollout.counts import Engine, Order, Seen
from rayloom_operator.decide.rollout.planner import next_step

CLOCK = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
START_S = 15
# How engines of a revision are broken, by its first letter. All others are good.
SLOW, CRASHES, FAILS_REQUESTS, NEVER_STARTS = "wxyz"


def make_order(revision="a", replicas=1, drain_seconds=10, **rollout):
    analysis = {"holdSeconds": 20, "minRequests": 10} | rollout.pop("analysis", {})
    given = {"progressDeadlineSeconds": 120, "analysis": analysis} | rollout
    return Order(
        revision=revision, replicas=replicas, drain_seconds=drain_seconds, rollout=Rollout.model_validate(given)
    )


@dataclass
class Running:
    """An engine."""

    name: str
    revision: str
    age: int = 0  # seconds since it was placed
    is_placed: bool = False
    is_short: bool = False  # no node had room for it
    ill_s: int = 0
    is_routed: bool = False
    is_listed: bool = False
    is_cordoned: bool = False  # its node is being emptied
    is_tolerant: bool = False  # the same, and it tolerates that
    is_drained: bool = False  # it was asked to drain
    unfound_s: int = 0  # for so long no client has found it
    num_in_flight: int = 0
    served_s: int = 0  # seconds in which it took requests
    ends_s: int | None = None

    @property
    def figures(self):
        if self.revision.startswith(FAILS_REQUESTS):
            return Figures(requests=2 * self.served_s, errors=2 * self.served_s)
        if self.revision.startswith(SLOW):
            num_requests = self.served_s // 3
            return Figures(requests=num_requests, ttft={"0.25": 0, "1": 0, "2.5": num_requests})
        return Figures(requests=2 * self.served_s, ttft=dict.fromkeys(("0.25", "1", "2.5"), 2 * self.served_s))

    @property
    def has_crashed(self):
        return self.revision.startswith(CRASHES) and self.age >= START_S

    @property
    def state(self):
        if not self.is_placed:
            return "unschedulable" if self.is_short else "pending"
        if self.age < START_S or self.revision.startswith(NEVER_STARTS):
            return "starting"
        if self.has_crashed:
            return "pending"
        if self.ill_s:
            return "ill"
        return "draining" if self.is_drained else "well"


class Rolling:
    def __init__(self, order=None, capacity=99):
        self.order, self.capacity = order or make_order(), capacity
        self.seconds, self.running, self.memory = 0, {}, RolloutState()
        self.has_stuck_streams, self.knows_nodes = False, True
        self.acts = []  # of the last turn, in their order
        self.step = None
        self.least_ready = 0  # what the disruption budget says, as written with the last turn
        self.evicted = []  # with how many then served

    @property
    def clock(self):
        return CLOCK + timedelta(seconds=self.seconds)

    @property
    def there(self):
        return [each for each in self.running.values() if each.ends_s is None]

    def revisions(self):
        return "".join(sorted(each.revision for each in self.there))

    def num_available(self):
        return sum(self.is_available(each) for each in self.there)

    @staticmethod
    def is_available(each):
        return each.state == "well" and each.is_routed and each.is_listed

    def seen(self):
        return Seen(
            engines=tuple(
                Engine(
                    name=each.name,
                    revision=each.revision,
                    state=each.state,
                    is_routed=each.is_routed,
                    is_listed=each.is_listed,
                    is_cordoned=each.is_cordoned,
                    is_tolerant=each.is_tolerant,
                    num_in_flight=each.num_in_flight,
                    figures=each.figures,
                )
                for each in self.there
            ),
            num_ending=len(self.running) - len(self.there),
            num_crashes=sum(each.has_crashed and each.revision == self.order.revision for each in self.there),
            cause="It ended with code 1.",
            knows_nodes=self.knows_nodes,
        )

    def pass_time(self, seconds):
        """In one go: what an engine does within these seconds, the next turn sees at their end."""
        self.seconds += seconds
        num_placed = sum(each.is_placed for each in self.running.values())
        for each in list(self.running.values()):
            if not each.is_placed and num_placed < self.capacity:
                each.is_placed, num_placed = True, num_placed + 1
            each.is_short = not each.is_placed
            self._live(each, seconds)

    def _live(self, each, seconds):
        if each.ends_s is not None:
            each.ends_s -= seconds
            if each.ends_s <= 0:
                del self.running[each.name]
            return
        each.age += seconds * each.is_placed
        each.ill_s = max(0, each.ill_s - seconds)
        each.unfound_s = 0 if each.is_routed or each.is_listed else each.unfound_s + seconds
        is_well = each.state == "well"
        if is_well and each.is_routed and each.is_listed:
            each.num_in_flight = 3
            each.served_s += seconds
        elif not self.has_stuck_streams and not each.ill_s:
            each.num_in_flight = max(0, each.num_in_flight - seconds)
        each.is_listed = each.is_routed and is_well

    def evict(self):
        """Asks for every engine on a node that is being emptied, as `kubectl drain` does each 5 s. Pods that are not
        ready always go."""
        for each in self.there:
            num_ready = sum(other.state == "well" for other in self.there)
            if each.is_cordoned and (each.state != "well" or num_ready > self.least_ready):
                self.end(each)
                self.evicted.append((each.name, self.num_available()))

    def turn(self, num_acts=None):
        """One pass; with `num_acts` the operator dies after so many acts, before anything is written."""
        memory = RolloutState.model_validate_json(self.memory.model_dump_json(by_alias=True))
        self.step = step = next_step(self.order, memory, self.seen(), self.clock)
        acts = [("undrain", name) for name in step.undrain] + [("route_on", name) for name in step.route_on]
        acts += [("make", revision) for revision, number in step.make.items() for _ in range(number)]
        for verb in ("route_off", "drain", "delete"):
            acts += [(verb, name) for name in getattr(step, verb)]
        for verb, name in acts[:num_acts]:
            getattr(self, f"_{verb}")(name)
        if num_acts is None:
            self.memory, self.acts = step.state, acts
            free = self.order.replicas // 2 if self.order.rollout.max_surge else self.order.least
            num_held = max(self.order.replicas, len(self.running)) - step.num_freed
            self.least_ready = num_held if step.holds_evictions else free
        return step

    def run(self, seconds, each_s=1):
        """Lets time pass with a turn after each so many seconds, and another while there is something new."""
        for _ in range(0, seconds, each_s):
            self.pass_time(each_s)
            self.turns()

    def turns(self):
        """Turns until there is nothing new. Returns whether time would change something by itself."""
        for _ in range(9):
            if (look_again_s := self.turn().look_again_s) != 0.0:
                return look_again_s is not None
        raise AssertionError(f"decides without end: {self.memory}")

    def _make(self, revision):
        assert len(self.running) < self.order.most, "more engines than replicas + maxSurge"
        num_there = sum(each.revision == revision for each in self.there)
        assert num_there < self.memory.counts.get(revision, 0), f"one more of {revision}, and nothing of it is written"
        assert self.memory.failure is None or revision != self.memory.failure.revision or not self._rolls_back(), (
            f"the failed revision {revision} is tried again"
        )
        number = next(each for each in range(99) if f"{revision}-{each}" not in self.running)
        self.running[f"{revision}-{number}"] = Running(f"{revision}-{number}", revision)

    def _rolls_back(self):
        return self.order.rollout.auto_rollback

    def _route_on(self, name):
        assert self.running[name].state == "well", "a route to an engine that made no token"
        self.running[name].is_routed = True

    def _route_off(self, name):
        each = self.running[name]
        assert name in self.memory.leaving or self.memory.failure is not None, f"that {name} goes is not written"
        if self.is_available(each):
            assert self.num_available() > self.order.least, f"too few serve without {name}"
            self._is_old_untouched(each)
        each.is_routed = False

    def _is_old_untouched(self, each):
        memory, num_old = self.memory, sum(other.revision == each.revision for other in self.there)
        if each.revision == memory.current_revision and num_old <= self.order.replicas and self.order.rollout.max_surge:
            assert memory.is_promoted, f"{each.name} goes before the new revision has proven itself"

    def _drain(self, name):
        each = self.running[name]
        assert not each.is_routed and not each.is_listed, f"{name} drains while clients find it"
        if not each.ill_s:
            each.is_drained = True

    def _undrain(self, name):
        self.running[name].is_drained = False

    def _delete(self, name):
        each = self.running[name]
        assert name in self.memory.leaving, f"that {name} goes is not written"
        assert not each.is_routed and not each.is_listed, f"{name} is deleted while clients find it"
        if each.state in ("well", "ill", "draining"):
            is_over = each.unfound_s >= self.order.drain_seconds
            assert (each.is_drained and each.num_in_flight == 0) or is_over, f"{name} has requests"
        self.end(each)

    def end(self, each, seconds=5):
        each.ends_s, each.is_routed, each.is_listed = seconds, False, False

    def ask(self, **changes):
        """Edits the spec: revision, replicas, or settings of `rollout`."""
        rollout = {name: changes.pop(name) for name in list(changes) if name not in ("revision", "replicas")}
        settings = self.order.rollout.model_copy(update=rollout)
        self.order = replace(self.order, rollout=settings, **changes)
