"""Keeps the samples of each service's load, and asks the scaler for its decision."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rayloom_operator.api.status import stored_autoscaling
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.rollout.view import view_of
from rayloom_operator.decide.scaling.inputs import Fleet
from rayloom_operator.decide.scaling.load import NOTHING_HELD, Held, load_of
from rayloom_operator.decide.scaling.scaler import ScalingDecision, decide_scaling
from rayloom_operator.decide.scaling.view import activity_of, bounds_of, engine_loads, num_available
from rayloom_operator.decide.scaling.windows import Sample, Windows
from rayloom_operator.kube.client import Kube
from rayloom_operator.names import Manifest, ServiceKey, path_of
from rayloom_operator.observe.observed import Observed
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.resolve.revision import revision
from rayloom_operator.texts import head, plain
from rayloom_operator.times import Now

_UNKNOWN_WRITER = "another client"
_MAX_WRITER = 128  # characters


@dataclass(slots=True)
class _History:
    uid: str  # uid of the service
    replicas: int  # spec.replicas at the time of the samples
    samples: deque[Sample] = field(default_factory=deque)


class ScalingGatherer:
    """Returns the scaler's decision for a service, and keeps the load samples that the scaler needs.

    Not thread-safe: used in one event loop. `held` returns the requests that a service's gateway holds; no gateway
    exists yet. `interval_s` returns the seconds between two answers of an engine.
    """

    def __init__(
        self,
        kube: Kube,
        windows: Windows,
        interval_s: Callable[[], float],
        held: Callable[[ServiceKey], Held] = lambda key: NOTHING_HELD,
    ) -> None:
        self._kube = kube
        self._windows = windows
        self._interval_s = interval_s
        self._held = held
        self._histories: dict[ServiceKey, _History] = {}

    def forget(self, key: ServiceKey) -> None:
        """Drops the samples of a deleted service."""
        self._histories.pop(key, None)

    async def next(
        self, key: ServiceKey, document: Manifest, resolved: Resolved, seen: Observed, step: Step, now: Now
    ) -> ScalingDecision | None:
        """Returns the decision; None without spec.autoscaling, or if the document is older than its last change."""
        spec = resolved.service.spec
        if spec.autoscaling is None:
            self.forget(key)
            return None
        stored = stored_autoscaling(document.get("status", {}))
        writer = ""
        if stored.reason and stored.desired != spec.replicas:
            found = await self._kube.get(path_of(document))
            if found["spec"].get("replicas") != spec.replicas:
                return None  # The event of the last change is still on its way.
            writer = writer_of(found)
        held = self._held(key)
        load = load_of(engine_loads(seen, step, now.mono), held, spec.autoscaling.goal.ttft_seconds)
        sample_s = max(self._windows.sample_s, self._interval_s())
        sample = Sample(now.mono, load.engines, load.is_complete)
        history = self._history(key, document["metadata"]["uid"], spec.replicas)
        keep_s = self._windows.stable_s(stored.start_seconds) + 2 * sample_s
        fleet = Fleet(
            replicas=spec.replicas,
            num_available=num_available(view_of(seen, {}, revision(resolved), mono=now.mono), step),
            rollout=activity_of(step),
            load=load,
            held=held,
            samples=self._sampled(history, sample, sample_s, keep_s),
            writer=writer,
        )
        decision = decide_scaling(bounds_of(spec.autoscaling), stored, fleet, self._windows, now)
        return replace(decision, sample_s=sample_s)

    def _sampled(self, history: _History, sample: Sample, sample_s: float, keep_s: float) -> tuple[Sample, ...]:
        """Adds the sample, unless the last one is younger than half of the interval, and returns all.

        Drops samples before the last `keep_s`, since thousands of services may have a history.
        """
        samples = history.samples
        if samples and sample.at - samples[-1].at > self._windows.window_s / 2:
            samples.clear()  # a mean over a gap would be that of single samples
        if not samples or sample.at - samples[-1].at >= sample_s / 2:
            samples.append(sample)
        while samples[0].at < sample.at - keep_s:
            samples.popleft()
        return tuple(samples)

    def _history(self, key: ServiceKey, uid: str, replicas: int) -> _History:
        """Returns the samples since the last change of `replicas`."""
        history = self._histories.get(key)
        if history is None or history.replicas != replicas or history.uid != uid:
            history = self._histories[key] = _History(uid, replicas)
        return history


def writer_of(document: Manifest) -> str:
    """Returns the field manager that last set spec.replicas, by the object's managedFields."""
    entries = [
        each
        for each in document["metadata"].get("managedFields", ())
        if "f:replicas" in each.get("fieldsV1", {}).get("f:spec", {}) and each.get("manager") != ""
    ]
    last: Manifest = max(entries, key=lambda each: str(each.get("time", "")), default={})
    return head(plain(str(last.get("manager", _UNKNOWN_WRITER))), _MAX_WRITER)
