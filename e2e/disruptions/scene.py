"""A service that tests break, and what they expect of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clients.load import Said
from clients.service import ROOT, Service, manifest
from disruptions.fault_under_load import Seen, disturb

HANG_SECONDS = 6


def breakable(namespace: str, **spec: Any) -> dict[str, Any]:
    """The manifest of two ranks in two pods, in float32."""
    # Every fault counts, and all of them come within minutes.
    recovery = {"hangSeconds": HANG_SECONDS, "restartBudget": 100}
    # One thread for each rank: on a machine with two cores, more would only wait for each other. And room in the step
    # for all that came in a minute without ranks, or the prober would wait for the others' ends.
    engine = {"args": {"threads": 1, "maxNumSeqs": 256}, "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}}}
    path = ROOT / "examples" / "smollm2-pp2.yaml"
    return manifest(path, namespace, **{"recovery": recovery, "engine": engine, **spec})


@dataclass(frozen=True)
class Scene:
    service: Service
    expected: Said
    show: Callable[[str, Seen], None]

    def break_it(self, what: str, strike: Callable[[], object], **more: Any) -> Seen:
        """Breaks something and expects that clients saw a pause, at most."""
        seen = disturb(self.service, self.expected, what, strike, **more)
        self.show(what, seen)
        assert seen.failures == [] and seen.probe_failures == []
        assert seen.lies == []
        return seen

    def is_serving_after(self, epoch: int) -> Callable[[], bool]:
        """Whether the engine serves, in a later epoch."""

        def is_rebuilt() -> bool:
            status = self.service.engine_status()
            return bool(status["state"] == "serving" and status["epoch"] > epoch)

        return is_rebuilt
