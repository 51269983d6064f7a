"""Computes when a service is reconciled next, unless an event triggers a reconcile earlier. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rayloom_operator.decide.changes.gateway import is_announced
from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.decide.route import route_requeues
from rayloom_operator.decide.situation import Situation
from rayloom_operator.observe.verdict import STALE_S, is_well, unreachable_at

# The interval while all engines of a service serve. The interval can be long, because an engine causes an event when it
# stops serving.
REGULAR_S = 300.0
# Objects without a watch, such as ConfigMaps, are applied again at this interval, in case a user has deleted them.
REAPPLY_S = 1800.0
# The kubelet reports a mount failure only in an Event, so Events are read while a pod waits. In the first minute, when
# a report is likely, they are read every 2 s, and later every 10 s. While a pod waits, objects are also applied again
# every 10 s, in case somebody has deleted the ConfigMap or Secret that the head pod mounts.
_MOUNT_CHECK_S = 2.0
LATE_MOUNT_CHECK_S = 10.0
_EARLY_MOUNT_S = 60.0
# The seconds until the next reconcile after a new failure. The status gets the failure first, and the next reconcile
# acts on the failure.
_NEXT_RECONCILE_S = 0.2


def reapply_after_s(situation: Situation) -> float:
    """Returns the seconds until applied objects are applied again."""
    return REAPPLY_S if situation.mounting_s is None else LATE_MOUNT_CHECK_S


def requeue_after_s(situation: Situation, planned: Plan) -> float:
    """Returns the seconds until the decision may change without any event."""
    return min(_reasons_to_requeue(situation, planned))


def _reasons_to_requeue(situation: Situation, planned: Plan) -> Iterator[float]:
    yield REGULAR_S if _is_well(situation) else STALE_S
    if planned.adapters:
        yield STALE_S  # PUT /adapters is repeated after this time, or earlier if a changed /status causes an event
    yield from _mounts(situation)
    yield from _silent_engines(situation)
    for time in (*planned.waits, *situation.observed.waits):
        yield (time - situation.now.wall).total_seconds()
    if situation.scaling is not None:
        yield situation.sample_s
    if situation.spec_requeue_s is not None:
        yield situation.spec_requeue_s
    if situation.inspection.look_again_s is not None:
        yield situation.inspection.look_again_s
    # While nothing can be created, a reconcile would change nothing: no failed replica is deleted, and the rollout
    # takes no step.
    if situation.can_create and _has_new_failure(situation):
        yield _NEXT_RECONCILE_S
    if situation.can_create and situation.resolved is not None and not is_announced(situation, situation.resolved):
        # The status gets the gateway first, and the next reconcile creates the gateway's objects.
        yield 0.0
    yield from route_requeues(situation)
    if situation.can_create and situation.step is not None and situation.step.requeue_after_s is not None:
        yield situation.step.requeue_after_s


def _is_well(situation: Situation) -> bool:
    """Returns whether every engine serves, or no engine was polled yet.

    If an engine does not serve, the service is reconciled more often, because an engine without progress causes no
    event.
    """
    replicas = situation.observed.replicas
    has_answers = any(each.reading is not None for each in replicas)
    return not has_answers or all(is_well(each, situation.now.mono) for each in replicas)


def _mounts(situation: Situation) -> Iterator[float]:
    if situation.mounting_s is not None:
        yield _MOUNT_CHECK_S if situation.mounting_s < _EARLY_MOUNT_S else LATE_MOUNT_CHECK_S


def _silent_engines(situation: Situation) -> Iterator[float]:
    """Yields, for each engine that does not answer, the seconds until the next reconcile that looks for an answer.

    If the engine does not count as unreachable yet, also yields the seconds until the engine counts as unreachable.
    """
    for replica in situation.observed.replicas:
        reading = replica.reading
        if reading is None or reading.failing_since is None:
            continue
        unreachable_in_s = unreachable_at(reading) - situation.now.mono
        if unreachable_in_s > 0:
            yield unreachable_in_s
        yield situation.retry_interval_s


def _has_new_failure(situation: Situation) -> bool:
    return any(
        place.replica is not None and place.failure is not None and place.failure.uid == place.replica.uid
        for place in situation.places
    )
