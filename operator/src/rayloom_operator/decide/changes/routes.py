"""Decides which head pods get or lose the route label, by which the Service sends them requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.situation import Situation
from rayloom_operator.observe.observed import EngineReplica, Pod
from rayloom_operator.observe.verdict import is_well

# States in which an engine accepts requests. In a recovering engine the requests wait.
_TAKES_REQUESTS = ("serving", "recovering")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A change of the route label of a head pod."""

    pod: Pod
    wanted: bool  # True: the pod gets the label, so the Service sends it requests


def route_changes(situation: Situation) -> tuple[Route, ...]:
    """Returns the changes of route labels: first additions, then removals, so that the service always has an engine.

    There are no changes until the rollout's next state is written, because that state says which replicas are
    terminated.
    """
    if situation.can_create and situation.step is not None and not situation.step.is_stored:
        return ()
    found: list[Route] = []
    has_serving = _has_routed_engine_that_serves(situation)
    for replica in situation.observed.replicas:
        head = replica.head
        if head is None:
            continue
        wanted = _is_wanted(replica, head, situation, has_serving=has_serving)
        if wanted is not None and wanted != head.is_routed:
            found.append(Route(pod=head, wanted=wanted))
    return tuple(sorted(found, key=lambda route: not route.wanted))


def _is_wanted(replica: EngineReplica, head: Pod, situation: Situation, *, has_serving: bool) -> bool | None:
    """Returns whether the head pod should have the route label; None if the label stays as it is.

    The label of a replica that is being terminated stays as it is: only a step of the rollout changes such a label. The
    label also stays if the engine's container is ready but the engine has not answered the operator yet.
    """
    step = _step_to_follow(situation)
    if step is not None and replica.name in step.route_off:
        return False
    status = replica.reading.status if replica.reading is not None else None
    if situation.is_leaving(replica.name) or (head.is_engine_ready and status is None):
        return None
    if not head.is_engine_ready or status is None or status.state not in _TAKES_REQUESTS:
        return False
    if is_well(replica, situation.now.mono):
        # Only the rollout adds a label. Otherwise a failed revision's engine would get requests as soon as the engine
        # serves.
        return head.is_routed or step is None or replica.name in step.route_on
    # In an engine that recovers or does not answer, requests may have to wait. So this engine has a route only while no
    # other engine accepts requests.
    return not has_serving


def _has_routed_engine_that_serves(situation: Situation) -> bool:
    """Returns whether an engine serves, is not being terminated, and has a route now or after this step."""
    step = _step_to_follow(situation)
    for replica in situation.observed.replicas:
        if situation.is_leaving(replica.name) or not is_well(replica, situation.now.mono):
            continue
        is_routed = replica.head is not None and replica.head.is_routed
        if is_routed or step is None or replica.name in step.route_on:
            return True
    return False


def _step_to_follow(situation: Situation) -> Step | None:
    """Returns the rollout's step if its state is written; None if there is no such step.

    A step whose state is not written yet routes no engine. While KubeRay cannot be used, the state is never written, so
    the result is None. If the result were the step, a recovered engine would get no route until KubeRay can be used.
    """
    step = situation.step
    return step if step is not None and step.is_stored else None
