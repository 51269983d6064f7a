"""Fleets and loads as the scaler sees them, and a small world in which its decisions have effects."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from rayloom_operator.api.autoscaling.state import ScalingInputs, ScalingState
from rayloom_operator.decide.scaling.inputs import Bounds, Fleet, RolloutActivity
from rayloom_operator.decide.scaling.load import Held, ServiceLoad
from rayloom_operator.decide.scaling.scaler import decide_scaling
from rayloom_operator.decide.scaling.windows import Sample, Windows
from rayloom_operator.times import Now

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
BOUNDS = Bounds(least=1, most=8, idle_s=600.0)
WINDOWS = Windows()


def make_load(number, *, is_complete=True, **inputs):
    """A load of so many fully used engines."""
    is_idle = is_complete and number == 0 and not inputs.get("held_requests")
    inputs = ScalingInputs(needed_engines=f"{number:.2f}", **inputs)
    return ServiceLoad(engines=number, is_complete=is_complete, is_idle=is_idle, inputs=inputs)


def steadily(load, *, seconds=120.0, until=1000.0, is_complete=True):
    """Samples of a load that stayed the same, every 2 s."""
    number = int(seconds // 2) + 1
    return tuple(Sample(until - 2 * (number - 1 - index), load, is_complete) for index in range(number))


def make_fleet(replicas=2, load=1.0, **facts):
    """A fleet that has been under this load for two minutes, all engines serving."""
    is_complete = facts.pop("is_complete", True)
    facts = {
        "num_available": replicas,
        "rollout": RolloutActivity.SETTLED,
        "load": make_load(load, is_complete=is_complete),
        "samples": steadily(load, is_complete=is_complete),
        **facts,
    }
    return Fleet(replicas=replicas, **facts)


def settled(replicas=2, **facts):
    """The state of a scaler whose last decision was to keep `replicas`."""
    return replace(ScalingState(desired=replicas, reason="Steady", message="m"), **facts)


def decided(fleet, stored=None, *, bounds=BOUNDS, windows=WINDOWS, mono=1000.0):
    """The decision, 1000 s after the beginning."""
    stored = settled(fleet.replicas) if stored is None else stored
    now = Now(BEGIN + timedelta(seconds=mono), mono)
    return decide_scaling(bounds, stored, fleet, windows, now)


@dataclass
class ScaledWorld:
    """A service whose engines serve `start_s` after they were added. The scaler decides every 2 s."""

    bounds: Bounds = BOUNDS
    replicas: int = 1
    start_s: float = 20.0
    at: float = 0.0
    stored: ScalingState = field(default_factory=ScalingState)
    samples: list = field(default_factory=list)
    changes: list = field(default_factory=list)  # (time, before, after, reason)
    starting: list = field(default_factory=list)  # times at which engines will serve
    writer: str = ""
    windows: Windows = WINDOWS

    @property
    def num_available(self):
        return self.replicas - sum(time > self.at for time in self.starting)

    def turn(self, load, *, rollout=RolloutActivity.SETTLED, is_complete=True, held=Held()):  # noqa: B008 - frozen
        """Takes a sample and a decision, two seconds after those before."""
        self.at += 2
        self.starting = [time for time in self.starting if time > self.at]
        self.samples.append(Sample(self.at, load, is_complete))
        fleet = Fleet(
            replicas=self.replicas,
            num_available=self.num_available,
            rollout=rollout,
            load=make_load(load, is_complete=is_complete, held_requests=held.requests),
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
        """Sets `replicas`, as the scaler does, or another writer."""
        self.starting = [*self.starting, *[self.at + self.start_s] * (replicas - self.replicas)][-replicas:]
        self.replicas = replicas
        self.samples = []
        self.writer = writer

    def restart(self):
        """The operator restarts, and its samples are gone."""
        self.samples = []
