"""The plan for a service whose spec the operator's settings do not allow. Pure.

No engine replica is created from such a spec, not even to replace a failed replica. Existing replicas stay reachable,
and protected by the NetworkPolicy. The user can still lower `spec.replicas`.
"""

from __future__ import annotations

from dataclasses import replace

from rayloom_operator.api.spec import LLMService
from rayloom_operator.decide.changes.deletion import Deletion
from rayloom_operator.decide.changes.gateway import renewed_secrets
from rayloom_operator.decide.changes.plan import Plan, replica_deletions
from rayloom_operator.decide.changes.routes import Route
from rayloom_operator.decide.situation import Situation
from rayloom_operator.objects.companions import client_service, service_account
from rayloom_operator.objects.guards import disruption_budget, network_policy
from rayloom_operator.observe.observed import EngineReplica
from rayloom_operator.observe.verdict import is_well


def held_plan(planned: Plan, service: LLMService, situation: Situation) -> Plan:
    """Returns `planned` plus the objects that existing replicas need. `planned` was made without a usable spec.

    Replicas beyond `spec.replicas` lose their route and are deleted. A deleted head pod drains by itself: its requests
    have `spec.drainSeconds` to finish.
    """
    if not situation.observed.replicas:
        return planned
    surplus = _surplus(service, situation)
    heads = [replica.head for replica in surplus if replica.head is not None]
    uids = {head.uid for head in heads}
    kept = tuple(each for each in planned.routes if each.pod.uid not in uids)
    off = tuple(Route(pod=head, wanted=False) for head in heads if head.is_routed)
    deletions: list[Deletion] = []
    for replica in surplus:
        deletions += replica_deletions(replica, service.metadata.namespace)
    return replace(
        planned,
        wanted=(
            service_account(service),
            client_service(service),
            # This budget allows every eviction. Waiting for a replacement would be of no use, because no replica is
            # created.
            disruption_budget(service),
            network_policy(service, situation.settings.namespace),
            *renewed_secrets(situation, service),
        ),
        routes=(*kept, *off),
        deletions=(*deletions, *planned.deletions),
    )


def _surplus(service: LLMService, situation: Situation) -> list[EngineReplica]:
    """Returns the replicas to delete, so that `spec.replicas` remain.

    Replicas that do not serve are deleted first, then replicas without a route, then replicas with the highest numbers.
    So a replica that lost its route in an earlier reconcile is chosen again.
    """

    def order(replica: EngineReplica) -> tuple[bool, bool, int]:
        is_routed = replica.head is not None and replica.head.is_routed
        return not is_well(replica, situation.now.mono), not is_routed, int(replica.name.rpartition("-")[2])

    return sorted(situation.observed.replicas, key=order)[service.spec.replicas :]
