"""The evidence for a service's conditions: its engine replicas, each with a verdict on its state. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rayloom_operator.api.status import ConditionType, Reason
from rayloom_operator.decide.recovery import Place, verdict_of
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.situation import Situation
from rayloom_operator.names import revision_of
from rayloom_operator.observe.observed import EngineReplica, Verdict
from rayloom_operator.observe.verdict import is_well, judge


class Finding(NamedTuple):
    """A condition without its timestamps."""

    type: ConditionType
    holds: bool
    because: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedReplica:
    """An engine replica that exists or is wanted, and the verdict on it."""

    place: Place
    verdict: Verdict

    @property
    def replica(self) -> EngineReplica | None:
        return self.place.replica

    @property
    def revision(self) -> str:
        return revision_of(self.place.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The situation of a service, and a verdict on each of its engine replicas."""

    situation: Situation
    accepted: Verdict  # VALID, or why the spec cannot be used, or why an object of the plan was refused
    step: Step | None  # the rollout's step; None while nothing can be planned, or KubeRay cannot be used
    is_made: bool  # replicas of the spec's revision can be created, or were created before
    staying: tuple[JudgedReplica, ...]  # wanted replicas, including those that do not exist yet
    leaving: tuple[JudgedReplica, ...]  # existing replicas that are not wanted any more
    alive: tuple[JudgedReplica, ...]  # `staying`, and those of `leaving` that still serve

    @property
    def is_accepted(self) -> bool:
        return self.accepted.reason is Reason.VALID


def gather_evidence(situation: Situation, accepted: Verdict) -> Evidence:
    """Returns the evidence, with `accepted` as the verdict on the spec."""
    step = None if situation.kuberay_problem else situation.step
    is_made = accepted.reason is Reason.VALID or (step is not None and _is_made(situation, step.state.update_revision))
    staying = tuple(_with_places(situation, is_made=is_made))
    leaving = tuple(
        JudgedReplica(
            place=Place(name=replica.name, replica=replica), verdict=_verdict_without_place(replica, situation)
        )
        for replica in _without_places(situation)
    )
    if situation.resolved is None:
        # Without a resolved spec there are no places. Then only the stored rollout state says which replicas leave.
        remaining = (each for each in leaving if not situation.is_leaving(each.place.name))
        staying = (*remaining, *_failed_before(situation))
        leaving = tuple(each for each in leaving if situation.is_leaving(each.place.name))
    return Evidence(
        situation=situation,
        accepted=accepted,
        step=step,
        is_made=is_made,
        staying=staying,
        leaving=leaving,
        alive=(*staying, *(each for each in leaving if each.verdict.reason is Reason.SERVING)),
    )


def _is_made(situation: Situation, revision: str) -> bool:
    """Returns whether replicas of the revision exist, or were created before."""
    if not revision:
        return False
    is_written = revision == situation.rollout.update_revision
    return is_written or any(each.revision == revision for each in situation.observed.replicas)


def _with_places(situation: Situation, *, is_made: bool) -> Iterator[JudgedReplica]:
    if situation.resolved is None:
        return
    recovery = situation.resolved.service.spec.recovery
    for place in situation.places:
        if place.replica is not None or place.failure is not None or is_made:
            yield JudgedReplica(place=place, verdict=verdict_of(place, recovery, situation.now))


def _without_places(situation: Situation) -> Iterator[EngineReplica]:
    placed = {place.name for place in situation.places}
    return (each for each in situation.observed.replicas if each.name not in placed)


def _verdict_without_place(replica: EngineReplica, situation: Situation) -> Verdict:
    """Returns the verdict on a replica that has no Place (`decide/recovery.py`).

    The verdict is DRAINING if three things are true: the rollout is terminating the replica, the head pod has no route
    label any more, and the engine still serves. For any other replica, `judge` gives the verdict.
    """
    now = situation.now.mono
    is_routed = replica.head is not None and replica.head.is_routed
    if not situation.is_leaving(replica.name) or is_routed or not is_well(replica, now):
        return judge(replica, now)
    message = f"{replica.name} leaves: it gets no more requests, and finishes those that it has."
    return Verdict(reason=Reason.DRAINING, message=message)


def _failed_before(situation: Situation) -> Iterator[JudgedReplica]:
    """Yields replicas that failed, were deleted, and cannot be recreated now: the status has to keep their failures."""
    existing = {replica.name for replica in situation.observed.replicas}
    for name, before in situation.memory.items():
        if before.failure is None or name in existing:
            continue
        words = f"The engine {name} failed, and is recreated once the spec and its model can be used. First failure: "
        yield JudgedReplica(
            place=Place(name=name, replica=None, restarts=before.restarts, failure=before.failure),
            verdict=Verdict(reason=Reason.GROUP_BACK_OFF, message=words + before.failure.message),
        )
