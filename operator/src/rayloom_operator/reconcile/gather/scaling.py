"""Keeps the samples of each service's load, and calls the scaler for a decision."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rayloom_operator.api.spec import Spec
from rayloom_operator.api.status import stored_autoscaling
from rayloom_operator.decide.rollout.planner import Planned
from rayloom_operator.decide.scaling.gateways import can_hold, ended_requests, held_in
from rayloom_operator.decide.scaling.load import NOTHING_HELD, Held, load_of
from rayloom_operator.decide.scaling.scaler import ScalingDecision, decide_scaling, is_zero_announced
from rayloom_operator.decide.scaling.view import (
    bounds_of,
    earlier_rate,
    engine_loads,
    engine_requests,
    fleet_of,
    may_be_empty,
    staying_engines,
)
from rayloom_operator.decide.scaling.windows import Sample, Windows
from rayloom_operator.kube.client import Kube
from rayloom_operator.names import Manifest, ServiceKey, path_of
from rayloom_operator.observe.observed import Observed
from rayloom_operator.texts import head, plain
from rayloom_operator.times import Now

_UNKNOWN_WRITER = "another client"
_MAX_WRITER = 128  # characters


@dataclass(slots=True)
class _History:
    uid: str  # uid of the service
    replicas: int  # spec.replicas at the time of the samples
    ttft_s: float  # the goal, in seconds, for which the loads of the samples were computed
    samples: deque[Sample] = field(default_factory=deque)


class ScalingGatherer:
    """Returns the scaler's decision for a service, and keeps the load samples that the scaler needs.

    `interval_s` returns the seconds between two answers of an engine.
    """

    def __init__(self, kube: Kube, windows: Windows, interval_s: Callable[[], float]) -> None:
        self._kube = kube
        self._windows = windows
        self._interval_s = interval_s
        self._histories: dict[ServiceKey, _History] = {}
        # time of the first reconcile that found the service idle, if all later reconciles found it idle, too
        self._idle_at: dict[ServiceKey, float] = {}
        # For each gateway pod, and for each engine: number of its requests that had ended by the last reconcile.
        self._ended: dict[ServiceKey, dict[str, int]] = {}
        self._ended_in_engines: dict[ServiceKey, dict[str, int]] = {}

    def forget(self, key: ServiceKey) -> None:
        """Drops the samples of a deleted service."""
        self._histories.pop(key, None)
        self._idle_at.pop(key, None)
        self._ended.pop(key, None)
        self._ended_in_engines.pop(key, None)

    async def next(
        self, key: ServiceKey, document: Manifest, spec: Spec, seen: Observed, planned: Planned, now: Now
    ) -> ScalingDecision | None:
        """Returns the decision; None without spec.autoscaling, or if `document` lacks the last change of `replicas`."""
        if spec.autoscaling is None:
            self.forget(key)
            return None
        stored = stored_autoscaling(document.get("status", {}))
        writer = ""
        # If `replicas` is not the stored number, the writer of `replicas` is read. A restored object, for example, has
        # no stored state. In that case the writer is read only if `replicas` is 0, because the scaler may have written
        # the 0.
        if stored.desired != spec.replicas if stored.reason else spec.replicas == 0:
            found = await self._kube.get(path_of(document))
            if found["spec"].get("replicas") != spec.replicas:
                return None  # The event of the last change is still on its way.
            writer = "" if is_zero_announced(stored) else writer_of(found)
        held = self._held(key, spec, seen, now.mono)
        ttft_s = spec.autoscaling.goal.ttft_seconds
        staying = staying_engines(planned)
        loads = engine_loads(seen, staying, now.mono, self._ended_in_engines.get(key))
        if may_be_empty(spec):
            self._ended_in_engines[key] = engine_requests(seen)
        else:
            self._ended_in_engines.pop(key, None)
        load = load_of(loads, held, ttft_s, earlier_rate(stored.inputs))
        sample = Sample(now.mono, load.engines, load.is_complete, load.queue)
        history = self._history(key, document["metadata"]["uid"], spec.replicas, ttft_s)
        samples = self._sampled(history, sample, self._windows.stable_s(stored.start_seconds))
        idle_at = self._idle_at.setdefault(key, now.mono) if load.is_idle else self._idle_at.pop(key, now.mono)
        fleet = replace(fleet_of(planned, load, held, samples), writer=writer, idle_s=now.mono - idle_at)
        bounds = bounds_of(spec.autoscaling, can_hold=can_hold(spec, seen))
        return decide_scaling(bounds, stored, fleet, self._windows, now)

    def _held(self, key: ServiceKey, spec: Spec, seen: Observed, mono: float) -> Held:
        """Returns the requests in the gateways, and keeps the counts of ended requests for the next reconcile."""
        if not may_be_empty(spec) or spec.gateway is None:
            self._ended.pop(key, None)
            return NOTHING_HELD
        held = held_in(seen, spec.gateway.replicas, self._ended.get(key), mono)
        self._ended[key] = ended_requests(seen)
        return held

    def sample_s(self) -> float:
        """Returns the seconds between two samples."""
        return max(self._windows.sample_s, self._interval_s())

    def _sampled(self, history: _History, sample: Sample, window_s: float) -> tuple[Sample, ...]:
        """Adds the sample, unless the last sample is younger than half of the interval, and returns all samples.

        Drops samples that are older than `window_s`, to limit the memory for the samples of thousands of services.
        """
        sample_s = self.sample_s()
        samples = history.samples
        if samples and sample.at - samples[-1].at > self._windows.window_s / 2:
            samples.clear()  # A mean over a gap would be the mean of few samples.
        if not samples or sample.at - samples[-1].at >= sample_s / 2:
            samples.append(sample)
        while samples[0].at < sample.at - window_s - 2 * sample_s:
            samples.popleft()
        return tuple(samples)

    def _history(self, key: ServiceKey, uid: str, replicas: int, ttft_s: float) -> _History:
        """Returns the samples since the last change of `replicas`, converted to the present goal."""
        history = self._histories.get(key)
        if history is None or history.replicas != replicas or history.uid != uid:
            history = self._histories[key] = _History(uid, replicas, ttft_s)
        if history.ttft_s != ttft_s:
            history.samples = deque(each.under(history.ttft_s, ttft_s) for each in history.samples)
            history.ttft_s = ttft_s
        return history


def writer_of(document: Manifest) -> str:
    """Returns the field manager that last set spec.replicas, according to the object's managedFields."""
    entries = [
        each
        for each in document["metadata"].get("managedFields", ())
        if "f:replicas" in each.get("fieldsV1", {}).get("f:spec", {}) and each.get("manager") != ""
    ]
    last: Manifest = max(entries, key=lambda each: str(each.get("time", "")), default={})
    return head(plain(str(last.get("manager", _UNKNOWN_WRITER))), _MAX_WRITER)
