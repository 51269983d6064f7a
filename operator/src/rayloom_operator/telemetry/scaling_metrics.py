"""The metrics of services with spec.autoscaling."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from rayloom_operator.api.autoscaling.state import ScalingInputs, ScalingState
from rayloom_operator.names import ServiceKey

SERVICE_LABELS = ("service_namespace", "service")


class ScalingMetrics:
    """Gauges of each autoscaled service, and a counter of all changes."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{prefix}_autoscaling_{name}", text, SERVICE_LABELS, registry=registry)

        self._desired = gauge("desired_replicas", "Engines that the scaler asks for.")
        self._needed = gauge("needed_engines", "Fully used engines that the present load takes.")
        self._queued = gauge("queued_tokens", "Tokens of prompts that wait to be computed, in all engines.")
        self._running = gauge("running_tokens", "Tokens that running requests hold, in all engines.")
        self._shown: set[ServiceKey] = set()
        self._changes = Counter(
            f"{prefix}_scalings",
            "Changes of replicas by the scaler, by direction: up or down.",
            ("direction",),
            registry=registry,
        )

    def show(self, key: ServiceKey, desired: int, inputs: ScalingInputs) -> None:
        """Sets the gauges of a service."""
        self._shown.add(key)
        self._desired.labels(*key).set(desired)
        self._needed.labels(*key).set(float(inputs.needed_engines))
        self._queued.labels(*key).set(inputs.queued_tokens)
        self._running.labels(*key).set(inputs.running_tokens)

    def forget(self, key: ServiceKey) -> None:
        """Drops the gauges of a service that was deleted, or whose spec.autoscaling was removed."""
        if key not in self._shown:
            return
        self._shown.remove(key)
        for each in (self._desired, self._needed, self._queued, self._running):
            each.remove(*key)

    def changed(self, before: ScalingState, after: ScalingState, replicas: int, writer: str) -> None:
        """Counts a change that `writer` made between these states. `replicas`: the number before the change."""
        if after.writer == writer and after.last_scale_time != before.last_scale_time and after.desired != replicas:
            self._changes.labels("up" if after.desired > replicas else "down").inc()
