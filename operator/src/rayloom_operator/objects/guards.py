"""What keeps others from doing harm to a service's pods: a budget for evictions, and a firewall."""

from __future__ import annotations

from rayloom_operator import names
from rayloom_operator.api import LLMService
from rayloom_operator.names import Manifest, metadata

# The label that the operator's own pods have from its chart.
_OPERATOR = {"app.kubernetes.io/name": "rayloom-operator"}


def disruption_budget(service: LLMService, *, holds_evictions: bool = False) -> Manifest:
    """How many head pods stay when nodes are drained: an engine is one of them, whatever its number of ranks.

    While `holds_evictions`, all that there are: another engine is made first for each whose node is being emptied.
    Otherwise half of the engines, rounded down, so that with one engine every drain goes on, and so it does while fewer
    than half of several are broken; where nothing may be surged, as many as are to serve.

    A whole number of pods that stay is the only budget that Kubernetes can reckon for pods of a RayCluster
    (https://kubernetes.io/docs/tasks/run-application/configure-pdb/#arbitrary-controllers-and-selectors).

    Worker pods are not guarded. Where those of several engines share a node, its drain takes ranks from all of them at
    once; their heads stay, and requests wait there until the ranks are replaced.
    """
    replicas, rollout = service.spec.replicas, service.spec.rollout
    least = replicas // 2 if rollout.max_surge else max(0, replicas - rollout.max_unavailable)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, names.account_name(service.metadata.name)),
        "spec": {
            "minAvailable": replicas + rollout.max_surge if holds_evictions else least,
            "selector": {"matchLabels": {names.SERVICE_LABEL: service.metadata.name, names.NODE_TYPE_LABEL: "head"}},
            # What is broken already is no reason to keep a node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def network_policy(service: LLMService) -> Manifest:
    """Clients reach the API, the operator the admin port, and the service's own pods each other. All may go out.

    The API port is Prometheus' as well.
    """
    own = {"matchLabels": {names.SERVICE_LABEL: service.metadata.name}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(service, names.account_name(service.metadata.name)),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": names.API_PORT, "protocol": "TCP"}]},
                {"from": [operator], "ports": [{"port": names.ADMIN_PORT, "protocol": "TCP"}]},
                {"from": [{"podSelector": own}]},
            ],
        },
    }
