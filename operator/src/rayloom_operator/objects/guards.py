"""What keeps others from doing harm to a service's pods: a budget for evictions, and a firewall."""

from __future__ import annotations

from rayloom_operator import names
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest, metadata

# The label that the operator's own pods have from its chart.
_OPERATOR = {"app.kubernetes.io/name": "rayloom-operator"}
# The API server puts it on every namespace, and nobody can give another one's.
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def disruption_budget(service: LLMService, num_held: int = 0) -> Manifest:
    """Which pods stay when nodes are drained.

    While evictions are held: all of an engine's, heads and workers, for there are `num_held` of them. So it is also
    while no node is being emptied, because `kubectl drain` evicts in the moment in which it cordons. Otherwise the head
    pods of half of the engines, rounded down, so that with one engine every drain goes on, and so it does while fewer
    than half of several are broken; where nothing may be surged, of as many as are to serve. Worker pods are not
    guarded then: requests wait in the engine until their ranks are replaced.

    A whole number of pods that stay is the only budget that Kubernetes can reckon for pods of a RayCluster
    (https://kubernetes.io/docs/tasks/run-application/configure-pdb/#arbitrary-controllers-and-selectors).
    """
    replicas, rollout = service.spec.replicas, service.spec.rollout
    least = replicas // 2 if rollout.max_surge else max(0, replicas - rollout.max_unavailable)
    values = ["head", "worker"] if num_held else ["head"]
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, names.account_name(service.metadata.name)),
        "spec": {
            "minAvailable": num_held or least,
            "selector": {
                "matchLabels": {names.SERVICE_LABEL: service.metadata.name},
                "matchExpressions": [{"key": names.NODE_TYPE_LABEL, "operator": "In", "values": values}],
            },
            # What is broken already is no reason to keep a node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def network_policy(service: LLMService, operator_namespace: str = "") -> Manifest:
    """Clients reach the API, the operator the admin port, and the service's own pods each other. All may go out.

    The API port is Prometheus' as well. Of an operator outside the cluster the namespace is empty, and then pods with
    the operator's label are let in wherever they are.
    """
    own = {"matchLabels": {names.SERVICE_LABEL: service.metadata.name}}
    where = {"matchLabels": {_NAMESPACE_LABEL: operator_namespace}} if operator_namespace else {}
    operator = {"namespaceSelector": where, "podSelector": {"matchLabels": _OPERATOR}}
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
