"""The examples of an admission policy and a quota refuse the fields that they list, and allow everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.place import REPOSITORY
from operator_processes.process import wait_until
from real_api_server.world import LLM, World
from simulated_nodes.api_client import MERGE, ApiError

POLICIES = REPOSITORY / "examples" / "policy"
Make = Callable[..., dict[str, Any]]
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"engine": {"image": "docker.io/other/engine"}}, "must come from registry.example.com"),
    ({"gateway": {"image": "docker.io/other/gateway"}}, "must come from registry.example.com"),
    ({"auth": {"apiKeySecretRef": {"name": "database", "key": "password"}}}, "names begin with api-keys"),
    ({"model": {"source": "hf://a/b", "tokenSecretRef": {"name": "other", "key": "t"}}}, "the Secret hub-token"),
    ({"scheduling": {"tolerations": [{"operator": "Exists"}]}}, "tolerate taints by their keys"),
    (
        {"scheduling": {"tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}]}},
        "none of the control plane",
    ),
    ({"scheduling": {"priorityClassName": "system-node-critical"}}, "are not for models"),
    ({"engine": {"imagePullSecrets": [{"name": "registry"}, {"name": "other"}]}}, "in the Secret registry"),
    (
        {"model": {"source": "hf://a/b", "cache": {"persistentVolumeClaim": "other"}}},
        "whose name begins with models",
    ),
    ({"model": {"source": "hf://a/b", "cache": {"hostPath": "/models"}}}, "must be a persistentVolumeClaim"),
    # A rollout adds one engine replica, so there are 9 replicas with 2 pods each.
    ({"replicas": 8}, "16 pods at most"),
    ({"replicas": 7, "rollout": {"maxSurge": 2}}, "rollout.maxSurge together"),
    ({"replicas": 4, "parallelism": {"pipeline": 8}}, "16 pods at most"),
    ({"autoscaling": {"maxReplicas": 8}}, "16 pods at most"),
    ({"replicas": 7, "gateway": {"replicas": 1}}, "gateway.replicas"),
    ({"podTemplate": {"head": {"metadata": {"labels": {"a": "b"}}}}}, "for those who run the cluster"),
)
ALLOWED: tuple[dict[str, Any], ...] = (
    {},
    {"engine": {"image": "registry.example.com/rayloom/engine:1"}, "replicas": 7},
    {"replicas": 8, "rollout": {"maxSurge": 0, "maxUnavailable": 1}},
    {"autoscaling": {"maxReplicas": 6}, "gateway": {"image": "registry.example.com/gateway:1", "replicas": 2}},
    {"engine": {"imagePullSecrets": [{"name": "registry"}]}},
    {"model": {"source": "hf://a/b", "cache": {"persistentVolumeClaim": "models-of-team"}}},
    {"scheduling": {"tolerations": [{"key": "gpu", "operator": "Exists"}], "priorityClassName": "models"}},
    {"model": {"source": "hf://a/b", "tokenSecretRef": {"name": "hub-token", "key": "t"}}},
)

_OTHER_KEYS = {"apiKeySecretRef": {"name": "database", "key": "password"}}
REFUSED_OF_GATEWAYS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"image": "docker.io/other/gateway"}, "must come from registry.example.com"),
    ({"auth": _OTHER_KEYS}, "names begin with api-keys"),
    ({"aliases": [{"name": "a", "targets": [{"service": "b"}], "auth": _OTHER_KEYS}]}, "names begin with api-keys"),
    ({"scheduling": {"tolerations": [{"operator": "Exists"}]}}, "tolerate taints by their keys"),
    ({"scheduling": {"priorityClassName": "system-node-critical"}}, "are not for gateways"),
    ({"imagePullSecrets": [{"name": "other"}]}, "in the Secret registry"),
)


@pytest.fixture
def tenants(world: World, namespace: str, kubectl: Kubectl) -> Iterator[str]:
    """The test's namespace, to which the policy applies."""
    world.request(
        "PATCH",
        f"/api/v1/namespaces/{namespace}",
        {"metadata": {"labels": {"rayloom-tenant": "true"}}},
        content_type=MERGE,
    )
    policy = (POLICIES / "admission.yaml").read_bytes()
    kubectl("apply", "--filename", "-", stdin=policy)
    yield namespace
    kubectl("delete", "--filename", "-", "--wait=false", stdin=policy)


def test_the_policy_refuses_what_it_says_and_nothing_else(world: World, tenants: str, manifest: Make) -> None:
    path = f"{LLM}/namespaces/{tenants}/llmservices"

    def refusal(spec: dict[str, Any]) -> str:
        try:
            world.request("POST", path, manifest(**spec), dryRun="All")
        except ApiError as error:
            return str(error)
        return ""

    # The API server enforces a new policy with a short delay.
    wait_until(lambda: refusal(REFUSED[0][0]) != "", "the policy to hold")
    for spec, sentence in REFUSED:
        assert sentence in refusal(spec), spec
    for spec in ALLOWED:
        assert refusal(spec) == "", spec


def test_the_policy_holds_for_gateways_too(world: World, tenants: str) -> None:
    path = f"{LLM}/namespaces/{tenants}/llmgateways"

    def refusal(spec: dict[str, Any]) -> str:
        document = {"apiVersion": "rayloom.dev/v1alpha1", "kind": "LLMGateway", "metadata": {"name": "public"}}
        selected = {"services": {"matchLabels": {"public": "yes"}}}
        try:
            world.request("POST", path, {**document, "spec": selected | spec}, dryRun="All")
        except ApiError as error:
            return str(error)
        return ""

    wait_until(lambda: refusal(REFUSED_OF_GATEWAYS[0][0]) != "", "the policy to hold")
    for spec, sentence in REFUSED_OF_GATEWAYS:
        assert sentence in refusal(spec), spec
    assert refusal({"image": "registry.example.com/gateway:1", "imagePullSecrets": [{"name": "registry"}]}) == ""


_COUNT = "count/llmservices.rayloom.dev"


def test_the_quota_counts_services(world: World, namespace: str, manifest: Make) -> None:
    quota = yaml.safe_load((POLICIES / "quota.yaml").read_text())
    most = int(quota["spec"]["hard"][_COUNT])
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    wait_until(lambda: _is_created_counted(world, quotas, quota), "a quota that counts LLMServices", 240)
    path = f"{LLM}/namespaces/{namespace}/llmservices"
    wait_until(lambda: _is_counted(world, f"{path}?dryRun=All", manifest("counted", replicas=0)), "a counted quota")
    for number in range(most):
        world.request("POST", path, manifest(f"a{number}", replicas=0))
    with pytest.raises(ApiError, match="exceeded quota"):
        world.request("POST", path, manifest("one-more", replicas=0))


def _is_created_counted(world: World, quotas: str, quota: dict[str, Any]) -> bool:
    """Creates the quota. If the quota does not count LLMServices, deletes it and returns False.

    kube-controller-manager discovers a new CRD within 30 s. It counts the objects of a new quota at once, and the
    objects of an existing quota only every five minutes.
    """
    path = f"{quotas}/{quota['metadata']['name']}"
    world.request("POST", quotas, quota)
    wait_until(lambda: "used" in world.request("GET", path).get("status", {}), "the status of the quota")
    if _COUNT in world.request("GET", path)["status"]["used"]:
        return True
    world.delete(path)
    return False


def _is_counted(world: World, path: str, manifest: dict[str, Any]) -> bool:
    """True once the quota's status is in the cache of the API server's quota admission."""
    try:
        world.request("POST", path, manifest)
    except ApiError as error:
        if "status unknown for quota" in str(error):
            return False
        raise
    return True
