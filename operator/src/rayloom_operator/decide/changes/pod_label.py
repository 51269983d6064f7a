"""PodLabel: a label that the operator sets on a running pod."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.observe.observed import Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLabel:
    """A new value of a pod's label."""

    pod: Pod
    name: str
    value: str
