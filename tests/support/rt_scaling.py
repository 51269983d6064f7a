"""Inputs of the scaler: fleets and loads. Also a simulated service that carries out the scaler's decisions."""

import math
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from rayloom_operator.api.autoscaling.state import ScalingInputs, ScalingState
from rayloom_operator.decide.rollout.planner import Planned, Step
from rayloom_operator.decide.rollout.view import desired_of, view_of
from rayloom_operator.decide.scaling.inputs import Bounds, Fleet, RolloutActivity
from rayloom_operator.decide.scaling.load import NOTHING_HELD, ServiceLoad
from rayloom_operator.decide.scaling.scaler import decide_scaling
from rayloom_operator.decide.scaling.windows import Sample, Windows
from rayloom_operator.resolve.revision import revision
from rayloom_operator.times import Now
from rt_operator import settled as settled_rollout

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
BOUNDS = Bounds(least=1, most=8, idle_s=600.0)
WINDOWS = Windows()


def make_load(number, *, is_complete=True, held=NOTHING_HELD, **inputs):
    """A load of `number` fully used engines."""
    is_idle = is_complete and number == 0 and held.is_idle
    inputs = {"held_tokens": held.tokens, "held_requests": held.requests, **inputs}
    inputs = ScalingInputs(needed_engines=f"{number:.2f}", **inputs)
    return ServiceLoad(engines=number, queue=number, is_complete=is_complete, is_idle=is_idle, inputs=inputs)


def steadily(load, *, seconds=120.0, until=1000.0, is_complete=True):
    """Samples of a constant load, every 2 s."""
    number = int(seconds // 2) + 1
    return tuple(Sample(until - 2 * (number - 1 - index), load, is_complete) for index in range(number))


def make_fleet(replicas=2, load=1.0, **facts):
    """A fleet whose engines are all available and that has had this load for two minutes."""
    is_complete = facts.pop("is_complete", True)
    facts = {
        "num_available": replicas,
        "num_for_load": replicas,
        "rollout": RolloutActivity.SETTLED,
        "load": make_load(load, is_complete=is_complete, held=facts.get("held", NOTHING_HELD)),
        "samples": steadily(load, is_complete=is_complete),
        **facts,
    }
    return Fleet(replicas=replicas, **facts)


def settled(replicas=2, **facts):
    """The state of a scaler whose last decision was to keep `replicas`."""
    return replace(ScalingState(desired=replicas, reason="Steady", message="m"), **facts)


def decided(fleet, stored=None, *, bounds=BOUNDS, windows=WINDOWS, mono=1000.0):
    """The scaler's decision, by default 1000 s after the beginning."""
    stored = settled(fleet.replicas) if stored is None else stored
    now = Now(BEGIN + timedelta(seconds=mono), mono)
    return decide_scaling(bounds, stored, fleet, windows, now)


def planned(resolved, seen, *, mono):
    """A completed rollout."""
    desired = desired_of(resolved, revision(resolved))
    state = replace(settled_rollout(resolved), step="Complete")
    step = Step(state=state, is_stored=True, message="")
    return Planned(desired=desired, view=view_of(seen, {}, desired.revision, mono=mono), step=step)


@dataclass
class ScaledWorld:
    """A service whose engines serve `start_s` seconds after they were added. The scaler decides every 2 s."""

    bounds: Bounds = BOUNDS
    replicas: int = 1
    start_s: float = 20.0
    at: float = 0.0
    stored: ScalingState = field(default_factory=ScalingState)
    samples: list = field(default_factory=list)
    changes: list = field(default_factory=list)  # (time, before, after, reason)
    starting: list = field(default_factory=list)  # times at which engines will serve
    writer: str = ""
    idle_at: float = math.inf
    windows: Windows = WINDOWS

    @property
    def num_available(self):
        return self.replicas - sum(time > self.at for time in self.starting)

    def turn(self, load, *, rollout=RolloutActivity.SETTLED, is_complete=True, held=NOTHING_HELD):
        """Advances the time by two seconds, then calls the scaler and carries out its decision."""
        self.at += 2
        self.starting = [time for time in self.starting if time > self.at]
        self.samples.append(Sample(self.at, load, is_complete))
        seen = make_load(load, is_complete=is_complete, held=held)
        self.idle_at = min(self.idle_at, self.at) if seen.is_idle else math.inf
        fleet = Fleet(
            replicas=self.replicas,
            num_available=self.num_available,
            num_for_load=self.replicas,
            rollout=rollout,
            load=seen,
            idle_s=max(0.0, self.at - self.idle_at),
            samples=tuple(self.samples),
            held=held,
            writer=self.writer,
        )
        self.writer = ""
        now = Now(BEGIN + timedelta(seconds=self.at), self.at)
        found = decide_scaling(self.bounds, self.stored, fleet, self.windows, now)
        self.stored = found.state
        if found.write is not None:
            self.changes.append((self.at, self.replicas, found.write, found.state.reason))
            self.put(found.write)
        return found

    def put(self, replicas, writer=""):
        """Sets `replicas`, as the scaler or as another writer."""
        self.starting = [*self.starting, *[self.at + self.start_s] * (replicas - self.replicas)][-replicas:]
        self.replicas = replicas
        self.samples = []
        self.writer = writer

    def restart(self):
        """The operator restarts, and its samples are gone."""
        self.samples = []
        self.idle_at = math.inf
