"""The guards of a service's pods, and the settings that follow from an engine's number and spec.recovery."""

import pytest

from rayloom_operator.names import object_path, path_of
from rayloom_operator.objects.companions import admin_secret, config_map
from rayloom_operator.objects.guards import disruption_budget, network_policy
from rayloom_operator.objects.ray_cluster import ray_cluster
from rt_operator import make_resolved, make_service

REVISION = "00000000"


@pytest.mark.parametrize(("replicas", "stay"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_a_drain_leaves_half_of_the_engines_and_one_alone_hinders_none(replicas, stay):
    spec = disruption_budget(make_service(replicas=replicas))["spec"]

    assert spec["minAvailable"] == stay
    assert guarded(spec) == ["head"]
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_held_budget_guards_heads_and_workers():
    spec = disruption_budget(make_service(replicas=2), num_held=6)["spec"]

    assert spec["minAvailable"] == 6
    assert guarded(spec) == ["head", "worker"]
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def guarded(spec):
    """The kinds of pods that `spec` selects."""
    assert spec["selector"]["matchLabels"] == {"rayloom.dev/service": "chat"}
    (kinds,) = spec["selector"]["matchExpressions"]
    assert (kinds["key"], kinds["operator"]) == ("ray.io/node-type", "In")
    return kinds["values"]


def test_strangers_reach_the_api_alone_and_the_operator_the_admin_port():
    spec = network_policy(make_service())["spec"]
    of_all, of_operator, of_own = spec["ingress"]

    assert (spec["policyTypes"], spec["podSelector"]) == (["Ingress"], {"matchLabels": {"rayloom.dev/service": "chat"}})
    assert ("from" not in of_all, [each["port"] for each in of_all["ports"]]) == (True, [8000])
    (operator,) = of_operator["from"]
    assert operator["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "rayloom-operator"}}
    assert operator["namespaceSelector"] == {}
    assert [each["port"] for each in of_operator["ports"]] == [8001]
    assert of_own == {"from": [{"podSelector": spec["podSelector"]}]}


def test_of_an_operator_in_the_cluster_only_its_own_namespace_reaches_the_admin_port():
    _, of_operator, _ = network_policy(make_service(), "rayloom-system")["spec"]["ingress"]

    (operator,) = of_operator["from"]
    # A pod of any tenant may have the operator's label, but cannot be in the operator's namespace.
    assert operator["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "rayloom-system"}}
    assert operator["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "rayloom-operator"}}


def test_every_port_of_a_container_is_open_to_somebody():
    cluster = ray_cluster(make_resolved(), REVISION)["spec"]
    head = cluster["headGroupSpec"]["template"]
    (workers,) = cluster["workerGroupSpecs"]
    policy = network_policy(make_service())["spec"]
    outside = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())}
    ports = {
        port["containerPort"]
        for template in (head, workers["template"])
        for container in template["spec"]["containers"]
        for port in container.get("ports", ())
    }

    assert outside < ports
    # Only pods of the service use the other port. The policy opens all ports between pods with its label, and all pods
    # of the service have this label.
    assert ports - outside == {8002}
    for template in (head, workers["template"]):
        assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_guards_have_a_name_of_their_own_and_a_path():
    for build, path in (
        (disruption_budget, "/apis/policy/v1/namespaces/team/poddisruptionbudgets/chat-rayloom"),
        (network_policy, "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies/chat-rayloom"),
    ):
        assert path_of(build(make_service())) == path
    assert object_path("v1", "Node") == "/api/v1/nodes"


def test_each_engine_has_names_of_its_own():
    resolved = make_resolved("a" * 40, replicas=64)
    cluster = ray_cluster(resolved, REVISION, 63)
    name = cluster["metadata"]["name"]

    assert (name, len(name) <= 53) == ("a" * 40 + "-00000000-63", True)
    assert cluster["metadata"]["labels"]["rayloom.dev/group"] == name
    head = cluster["spec"]["headGroupSpec"]["template"]
    assert head["metadata"]["labels"]["rayloom.dev/group"] == name
    (volume,) = [each for each in head["spec"]["volumes"] if each["name"] == "config"]
    config, secret = config_map(resolved, REVISION, 63), admin_secret(resolved.service, REVISION, b"k", 63)
    assert volume["projected"]["sources"][0]["configMap"]["name"] == config["metadata"]["name"] == name
    assert volume["projected"]["sources"][1]["secret"]["name"] == secret["metadata"]["name"] == f"{name}-admin"


def test_no_other_head_takes_the_place_of_a_lost_one():
    # With a new head, KubeRay deletes the workers of the old head.
    annotations = ray_cluster(make_resolved(), REVISION)["metadata"]["annotations"]

    assert annotations == {"ray.io/disable-provisioned-head-restart": "true"}


def test_pods_bear_a_lost_node_for_as_long_as_the_operator_does():
    spec = ray_cluster(make_resolved(recovery={"nodeLossSeconds": 7}), REVISION)["spec"]
    (workers,) = spec["workerGroupSpecs"]
    for template in (spec["headGroupSpec"]["template"], workers["template"]):
        assert [each["tolerationSeconds"] for each in template["spec"]["tolerations"]] == [7, 7]
