"""The input of a decision: everything that one reconcile has gathered about a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.api.spec import LLMService
from rayloom_operator.decide.inspection import Inspection
from rayloom_operator.decide.recovery import Memory, Place
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.rollout.revisions import RevisionPlaces
from rayloom_operator.decide.scaling.scaler import ScalingDecision
from rayloom_operator.decide.settings import Settings
from rayloom_operator.observe.observed import Observed, Verdict
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.times import Now


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The input of `decide`. Equal situations give equal decisions.

    A situation refers to objects in the caches of the watches without copying them: do not change these objects.
    """

    now: Now
    settings: Settings
    # The LLMService.
    generation: int  # metadata.generation of the service
    previous: Mapping[str, Any]  # last written status of the service
    memory: Memory  # name of an engine replica -> its entry in `previous`
    rollout: RolloutState  # the rollout state in `previous`
    # The LLMService. Has a placeholder spec if the spec cannot be read; None if the metadata cannot be read.
    service: LLMService | None
    accepted: Verdict  # VALID, or why the spec cannot be used
    spec_requeue_s: float | None = None  # seconds until `accepted` may change without an event; None: never
    # The model, and the spec in which every open value is filled in.
    inspection: Inspection = field(default_factory=Inspection)
    resolved: Resolved | None = None  # None while the spec cannot be used or the model is not known
    # The cluster.
    observed: Observed = field(default_factory=Observed)
    route_refusal: str = ""  # why the gateway's HTTPRoute or Ingress could not be written; known after the attempt
    kuberay_problem: str = ""  # why no RayCluster can be created; empty if KubeRay can be used
    mounting_s: float | None = None  # seconds that a pod has waited, perhaps for a volume; None if no pod waits
    retry_interval_s: float = 1.0  # seconds between reconciles while an engine of the service does not answer
    # The rollout: the next step, and the places of each revision. Both are empty while `resolved` is None.
    step: Step | None = None
    revisions: tuple[RevisionPlaces, ...] = ()
    # the scaler's decision; None without spec.autoscaling, or while `resolved` is None
    scaling: ScalingDecision | None = None
    sample_s: float = 2.0  # seconds between two samples of the load, if there is spec.autoscaling

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of all revisions."""
        return tuple(place for each in self.revisions for place in each.places)

    @property
    def can_create(self) -> bool:
        """True if engine replicas can be created: spec and KubeRay can be used, and the model is known."""
        return self.resolved is not None and self.step is not None and not self.kuberay_problem

    def is_leaving(self, replica: str) -> bool:
        """Returns whether the rollout terminates this replica.

        The next step's state decides this. If there is no step, or if no engine replica can be created, the stored
        state decides.
        """
        state = self.step.state if self.step is not None and self.can_create else self.rollout
        return replica in state.terminating
