"""Builds the PodDisruptionBudget and the NetworkPolicy of a service."""

from __future__ import annotations

from collections.abc import Mapping

from rayloom_operator import names
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest, metadata

# The label that the Helm chart puts on the operator's pods.
_OPERATOR = {"app.kubernetes.io/name": "rayloom-operator"}
# The API server sets this label on every namespace, and no user can set it to another namespace's name.
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def disruption_budget(service: LLMService, num_held: int = 0) -> Manifest:
    """The PodDisruptionBudget that says which pods `kubectl drain` may not evict.

    With an eviction hold, `num_held` is the number of all head and worker pods, and no pod may be evicted. The hold is
    on even while no node is cordoned, because `kubectl drain` evicts immediately after it cordons. Without a hold,
    `num_held` is 0.

    Without a hold, the head pods of half of the engine replicas, rounded down, are protected. So with one replica,
    `kubectl drain` always proceeds. With several replicas, it proceeds while fewer than half of the head pods are
    unavailable.
    With maxSurge 0, the protected number is replicas - maxUnavailable. Without a hold, worker pods are not protected:
    requests wait in the engine until lost ranks are replaced.

    `minAvailable` is a whole number because Kubernetes computes no percentage for pods of a RayCluster
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
            # Pods that are already unready do not block a drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def network_policy(service: LLMService, operator_namespace: str = "") -> Manifest:
    """The NetworkPolicy: the API port is open to everyone, the admin port to the operator, the front port to
    LLMGateways.

    The service's pods may reach each other on all ports. Prometheus scrapes the API port. Egress is open. The front
    port exists if the service has `gateway`. Pods of all LLMGateways in the namespace can reach the front port, which a
    key protects.
    """
    own = {"matchLabels": {names.SERVICE_LABEL: service.metadata.name}}
    rules = [from_clients(), from_operator(operator_namespace), {"from": [{"podSelector": own}]}]
    if service.spec.gateway is not None:
        gateways = {"matchExpressions": [{"key": names.LLMGATEWAY_LABEL, "operator": "Exists"}]}
        rules.append({"from": [{"podSelector": gateways}], "ports": [{"port": names.FRONT_PORT, "protocol": "TCP"}]})
    return ingress_policy(metadata(service, names.account_name(service.metadata.name)), own["matchLabels"], rules)


def from_clients() -> Manifest:
    """The rule that everyone may reach the API port."""
    return {"ports": [{"port": names.API_PORT, "protocol": "TCP"}]}


def from_operator(operator_namespace: str) -> Manifest:
    """The rule that the operator may reach the admin port.

    An operator outside the cluster has no namespace (""); the rule then admits pods with the operator's label in any
    namespace.
    """
    where = {"matchLabels": {_NAMESPACE_LABEL: operator_namespace}} if operator_namespace else {}
    operator = {"namespaceSelector": where, "podSelector": {"matchLabels": _OPERATOR}}
    return {"from": [operator], "ports": [{"port": names.ADMIN_PORT, "protocol": "TCP"}]}


def ingress_policy(metadata: Manifest, pods: Mapping[str, str], rules: list[Manifest]) -> Manifest:
    """A NetworkPolicy with these rules for incoming connections of the pods with these labels."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {"podSelector": {"matchLabels": dict(pods)}, "policyTypes": ["Ingress"], "ingress": rules},
    }
