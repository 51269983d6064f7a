"""A service on which tests cause faults, with its expected tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clients.load import NUM_TOKENS, StreamTokens
from clients.service import ROOT, Service, manifest
from disruptions.fault_under_load import FaultRecord, disturb

HANG_SECONDS = 6
# Two parallel streams until the fault is over, so that at least one stream is waiting while the fault affects the
# engine.
_STEADY = {"steady": 2, "late_tokens": NUM_TOKENS, "late_every_s": 0.05}


def breakable(namespace: str, **spec: Any) -> dict[str, Any]:
    """The manifest of a service with two ranks in two pods, in float32."""
    # The restart budget is large, because every fault counts and all faults happen within minutes.
    recovery = {"hangSeconds": HANG_SECONDS, "restartBudget": 100}
    # Each rank has one thread, because more threads would wait for each other on two cores. maxNumSeqs suffices for all
    # requests that arrive in a minute without ranks. With a lower value, probes would wait until other requests end.
    engine = {"args": {"threads": 1, "maxNumSeqs": 256}, "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}}}
    path = ROOT / "examples" / "smollm2-pp2.yaml"
    return manifest(path, namespace, **{"recovery": recovery, "engine": engine, **spec})


@dataclass(frozen=True)
class Scene:
    service: Service
    expected: StreamTokens
    show: Callable[[str, FaultRecord], None]

    def break_it(self, what: str, strike: Callable[[], object], **more: Any) -> FaultRecord:
        """Calls `strike` under load, and expects that clients notice no more than a pause."""
        seen = disturb(self.service, self.expected, what, strike, **(_STEADY | more))
        self.show(what, seen)
        assert seen.failures == [] and seen.probe_failures == []
        assert seen.untrue_times == []
        return seen

    def is_serving_after(self, epoch: int) -> Callable[[], bool]:
        """A predicate: the engine serves in an epoch after `epoch`."""

        def is_rebuilt() -> bool:
            status = self.service.engine_status()
            return bool(status["state"] == "serving" and status["epoch"] > epoch)

        return is_rebuilt
