"""The figures in an operator's /metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass

from operator_processes.process import OperatorProcess

# Verbs of requests that do not change the cluster. Each other verb counts as a write, also one that is added later.
_READS = ("get", "list", "watch")


@dataclass(frozen=True, slots=True)
class Scrape:
    """An operator's /metrics, and the CPU time of its process."""

    text: str
    cpu_s: float

    @classmethod
    def of(cls, operator: OperatorProcess) -> Scrape:
        return cls(operator.scrape(), operator.cpu_seconds())

    def total(self, name: str, part: str = "") -> float:
        """Sums the values of a counter or gauge whose labels contain the text `part`."""
        pattern = rf"(?m)^rayloom_operator_{name}(\{{[^}}]*\}})? (\S+)$"
        return sum(float(value) for labels, value in re.findall(pattern, self.text) if part in labels)

    def num_writes(self) -> float:
        """The number of requests that may have changed the cluster."""
        reads = sum(self.total("api_requests_total", f'verb="{verb}"') for verb in _READS)
        return self.total("api_requests_total") - reads

    def quantile(self, share: float, before: Scrape, name: str = "reconcile", part: str = "") -> float:
        """The upper bound, in ms, of the bucket that holds the quantile `share`.

        Counts the reconciles (or, with the name "queue", the waits in the work queue) since `before`.
        """
        pattern = rf'(?m)^rayloom_operator_{name}_seconds_bucket\{{(?=.*{part}).*?le="([^"]+)".*?\}} (\S+)$'
        old = dict(re.findall(pattern, before.text))
        buckets = [(bound, float(value) - float(old.get(bound, 0))) for bound, value in re.findall(pattern, self.text)]
        whole = max((count for _, count in buckets), default=0.0)
        return next((float(bound) * 1000 for bound, count in buckets if whole and count >= share * whole), float("nan"))
