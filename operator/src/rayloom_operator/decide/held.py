"""What is still done for a service whose spec the operator's settings do not allow. Pure.

No engine is made of such a spec, also none in the place of one that failed. Engines that run stay reachable and
protected, and the user can still lower `spec.replicas`.
"""

from __future__ import annotations

from dataclasses import replace

from rayloom_operator.api.spec import LLMService
from rayloom_operator.decide.plan import Deletion, Plan, Route, group_deletions
from rayloom_operator.objects.companions import client_service, service_account
from rayloom_operator.objects.guards import disruption_budget, network_policy
from rayloom_operator.observe.observed import Group, Observed
from rayloom_operator.observe.verdict import is_well


def held_plan(planned: Plan, service: LLMService, seen: Observed, operator_namespace: str, *, now: float) -> Plan:
    """`planned` for a spec that cannot be used, with what holds for engines that run.

    Engines beyond `spec.replicas` leave the Service and are deleted. A head pod that is deleted drains by itself: its
    requests have `spec.drainSeconds` to finish.
    """
    if not seen.groups:
        return planned
    going = _surplus(service, seen, now)
    heads = [group.head for group in going if group.head is not None]
    uids = {head.uid for head in heads}
    kept = tuple(each for each in planned.routes if each.pod.uid not in uids)
    off = tuple(Route(pod=head, wanted=False) for head in heads if head.is_routed)
    namespace = service.metadata.namespace
    deletions: list[Deletion] = []
    for group in going:
        deletions += group_deletions(group, namespace)
    return replace(
        planned,
        wanted=(
            service_account(service),
            client_service(service),
            # No engine is made in the place of another, so no eviction has to wait for one.
            disruption_budget(service),
            network_policy(service, operator_namespace),
        ),
        routes=(*kept, *off),
        deletions=(*deletions, *planned.deletions),
    )


def _surplus(service: LLMService, seen: Observed, now: float) -> list[Group]:
    """The engines beyond `spec.replicas`: those that serve nobody first, then those with the highest numbers.

    An engine that has left the Service in an earlier pass is chosen again.
    """

    def place(group: Group) -> tuple[bool, bool, int]:
        is_routed = group.head is not None and group.head.is_routed
        return not is_well(group, now), not is_routed, int(group.name.rpartition("-")[2])

    return sorted(seen.groups, key=place)[service.spec.replicas :]
