"""The operator's metrics, in Prometheus' text format."""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.errors import OperatorError, Refused
from rayloom_operator.names import ServiceKey
from rayloom_operator.telemetry.scaling_metrics import SERVICE_LABELS, ScalingMetrics

_PREFIX = "rayloom_operator"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_WAIT_SECONDS = (*_SECONDS, 60, 300, 900)  # up to 15 min, because thousands of services may wait
_ROLLOUT_SECONDS = (15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200)  # an engine may load for an hour

# The gauges: name -> help text.
GAUGES = {
    "leader": "1 in the operator that leads, 0 in a standby.",
    "queue_depth": "Services that wait for a reconcile.",
    "engines_polled": "Engine replicas that are polled for their status.",
}
# The other metrics: name without the prefix -> labels.
LABELS = {
    "reconcile": ("result",),
    "queue_seconds": ("priority",),
    "api_requests": ("verb", "code"),
    "rollout_steps": ("step",),
    "rollout_failures": ("reason",),
    "rollout_seconds": ("end",),
    "services": ("condition", "status"),
    "scalings": ("direction",),
    "autoscaling_desired_replicas": SERVICE_LABELS,
    "autoscaling_needed_engines": SERVICE_LABELS,
    "autoscaling_queued_tokens": SERVICE_LABELS,
    "autoscaling_running_tokens": SERVICE_LABELS,
}

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics. Counters and histograms are updated at each event; gauges are read at each scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.scaling = ScalingMetrics(_PREFIX, self._registry)
        self._reconcile_seconds = Histogram(
            f"{_PREFIX}_reconcile_seconds",
            "Seconds of one reconcile of a service.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._reconciles = Counter(
            f"{_PREFIX}_reconcile",
            "Reconciles by result: done, refused (the spec or the cluster has to change), failed (retried), bug (an "
            "error in the operator).",
            LABELS["reconcile"],
            registry=self._registry,
        )
        self._queue_seconds = Histogram(
            f"{_PREFIX}_queue_seconds",
            "Seconds for which a service waited for a reconcile. `news`: an event of an engine or pod; `known`: a "
            "change of the spec or the regular resync; `new`: a service without an earlier reconcile.",
            LABELS["queue_seconds"],
            buckets=_WAIT_SECONDS,
            registry=self._registry,
        )
        self._requests = Counter(
            f"{_PREFIX}_api_requests",
            "Requests to the API server; the code is none where there was no answer.",
            LABELS["api_requests"],
            registry=self._registry,
        )
        self._rollout_steps = Counter(
            f"{_PREFIX}_rollout_steps",
            "Rollout steps that began: RolledBack counts rollouts that were undone, WaitingForCapacity rollouts for "
            "which the cluster had no room.",
            LABELS["rollout_steps"],
            registry=self._registry,
        )
        self._rollout_failures = Counter(
            f"{_PREFIX}_rollout_failures",
            "Revisions that failed: AnalysisFailed, CrashLoop or DeadlineExceeded.",
            LABELS["rollout_failures"],
            registry=self._registry,
        )
        self._rollout_seconds = Histogram(
            f"{_PREFIX}_rollout_seconds",
            "Seconds of rollouts that ended, pauses included. Complete: since the spec changed; RolledBack: since the "
            "failure.",
            LABELS["rollout_seconds"],
            buckets=_ROLLOUT_SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def count_request(self, verb: str, code: str) -> None:
        """Counts a request to the API server. `code`: the HTTP status, or `none` if there was no answer."""
        self._requests.labels(verb, code).inc()

    def waited(self, priority: str, seconds: float) -> None:
        """Records that a service waited for `seconds` before its reconcile."""
        self._queue_seconds.labels(priority).observe(seconds)

    def measured(
        self, handle: Callable[[ServiceKey], Awaitable[float | None]]
    ) -> Callable[[ServiceKey], Awaitable[float | None]]:
        """Wraps `handle`, to record the duration and the result of each call."""

        async def measured(key: ServiceKey) -> float | None:
            began = time.monotonic()
            result = "bug"
            try:
                delay = await handle(key)
                result = "done"
                return delay
            except Refused:
                result = "refused"
                raise
            except OperatorError:
                result = "failed"
                raise
            finally:
                self._reconcile_seconds.observe(time.monotonic() - began)
                self._reconciles.labels(result).inc()

        return measured

    def rolled(self, before: RolloutState, after: RolloutState, clock: datetime) -> None:
        """Compares the rollout states of two successive statuses, and counts a new step, a failure or an end."""
        if after.step and after.step != before.step:
            self._rollout_steps.labels(after.step).inc()
        failure = after.failure
        if failure is not None and failure != before.failure:
            self._rollout_failures.labels(failure.reason).inc()
        if before.start_time and after.current_revision == after.update_revision == before.update_revision:
            self._ended("Complete", before.start_time, clock)
        if failure is not None and after.step == "RolledBack" != before.step:
            self._ended("RolledBack", failure.time, clock)

    def _ended(self, end: str, began: str, clock: datetime) -> None:
        self._rollout_seconds.labels(end).observe((clock - datetime.fromisoformat(began)).total_seconds())

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Adds a gauge, with a name in GAUGES. `read` is called at each scrape."""
        Gauge(f"{_PREFIX}_{name}", GAUGES[name], registry=self._registry).set_function(read)

    def described(self) -> tuple[tuple[str, str, tuple[str, ...], str], ...]:
        """Returns (name, kind, labels, help) of each of the operator's own metrics, sorted by name."""
        found = []
        for family in self._registry.collect():
            if family.name.startswith(_PREFIX):
                name = family.name + ("_total" if family.type == "counter" else "")
                labels = LABELS.get(family.name.removeprefix(f"{_PREFIX}_"), ())
                found.append((name, family.type, labels, family.documentation))
        return tuple(sorted(found))

    def follow(self, conditions: Callable[[], Iterable[tuple[str, str]]], poll_failures: Callable[[], int]) -> None:
        """Adds two metrics that are read at each scrape: services counted by (condition type, status), and failed
        polls."""

        class Services(Collector):
            def collect(self) -> Iterable[Metric]:
                failures = CounterMetricFamily(
                    f"{_PREFIX}_engine_poll_failures", "Status polls of engine replicas without an answer."
                )
                failures.add_metric([], poll_failures())
                services = GaugeMetricFamily(
                    f"{_PREFIX}_services", "Services, by condition and its status.", labels=LABELS["services"]
                )
                for labels, number in sorted(Count(conditions()).items()):
                    services.add_metric(list(labels), number)
                return [failures, services]

        self._registry.register(Services())
