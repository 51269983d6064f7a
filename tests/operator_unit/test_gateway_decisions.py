"""The decisions about a gateway: its objects and their deletion, the endpoint, status.gateway and the conditions."""

from dataclasses import replace

import pytest

from rayloom_operator.decide.decision import decide
from rayloom_operator.decide.status import status
from rayloom_operator.observe.pods import pod
from rt_operator import (
    conditions,
    make_group,
    make_pod,
    make_pod_document,
    make_reading,
    make_resolved,
    make_said,
    make_serving,
    turn,
    waiting,
)

DIRECT, THROUGH = "http://chat.team.svc:8000", "http://chat-gateway.team.svc:8000"
ONE = make_resolved()
BEHIND = make_resolved(gateway={"replicas": 2})
OFF = make_resolved(gateway={"replicas": 0})
STORED = {"gateway": {"replicas": 2, "ready": 0, "reason": "Starting"}}
LEFT = {"gateway": {"replicas": 0, "ready": 0, "reason": "Off"}}
OF_PODS = ["Service chat-gateway", "PodDisruptionBudget chat-gateway", "Deployment chat-gateway"]


def gateway_pod(name="gateway-a", *, ready=True, state=None):
    document = make_pod_document(name, is_head=False, ready=ready, engine=state)
    document["metadata"]["labels"] = {"rayloom.dev/gateway": "chat", "rayloom.dev/service": "chat"}
    document["status"]["containerStatuses"][0]["name"] = "gateway"
    return pod(document)


def made(found):
    """Kind and name, without hashes, of each object of the gateway that the plan applies."""
    wanted = [(each["kind"], each["metadata"]["name"]) for each in found.plan.wanted]
    ours = [(kind, name) for kind, name in wanted if name.startswith(("chat-gateway", "chat-engines"))]
    return [f"{kind} chat-gateway-key" if kind == "Secret" else f"{kind} {name}" for kind, name in ours]


def deleted(found):
    paths = [each.path.split("/")[-2:] for each in found.plan.deletions]
    ours = [(kind, name) for kind, name in paths if name.startswith(("chat-gateway", "chat-engines"))]
    return [f"{kind} key" if kind == "secrets" else f"{kind} {name}" for kind, name in ours]


def settled(resolved, *gateways, previous=None, groups=None, old=(), **facts):
    """Reconciles a service whose engine serves."""
    groups = [make_serving(resolved)] if groups is None else groups
    before = turn(resolved, groups, old=old).document
    return turn(resolved, groups, previous={**before, **(previous or {})}, gateways=gateways, old=old, **facts)


def test_a_service_without_the_part_has_nothing_of_it():
    found = settled(ONE)

    assert (made(found), deleted(found)) == ([], [])
    assert found.status.gateway is None
    assert found.document["endpoint"] == DIRECT
    assert "gateway" not in found.document


def test_the_status_names_the_gateway_before_its_first_object_exists():
    first = turn(BEHIND)

    assert made(first) == []
    assert first.document["gateway"]["replicas"] == 2
    assert decide(first.situation).requeue_after_s == 0
    second = turn(BEHIND, previous=first.document)
    assert made(second) == ["Secret chat-gateway-key", "Service chat-engines", *OF_PODS]
    assert decide(replace(second.situation, step=None)).requeue_after_s > 0


def test_a_new_service_shows_the_gateways_url_from_the_start():
    assert turn(BEHIND).document["endpoint"] == THROUGH


def test_with_no_pods_wanted_the_engines_stay_ready_for_them():
    found = settled(OFF, previous=LEFT)

    assert made(found) == ["Secret chat-gateway-key", "Service chat-engines"]
    assert deleted(found) == []
    assert found.document["endpoint"] == DIRECT
    assert found.document["gateway"]["reason"] == "Off"


def test_pods_that_are_no_longer_wanted_are_deleted_once_their_owner_is_checked():
    found = settled(OFF, gateway_pod(), previous=STORED)

    assert deleted(found) == [
        "services chat-gateway",
        "deployments chat-gateway",
        "poddisruptionbudgets chat-gateway",
    ]
    assert {each.owner_uid for each in found.plan.deletions} == {"uid-1"}
    assert found.document["gateway"]["replicas"] == 0
    assert deleted(settled(OFF, previous={"gateway": found.document["gateway"]})) == []


def test_removing_the_part_deletes_everything():
    found = settled(ONE, previous=STORED)

    assert deleted(found) == [
        "services chat-gateway",
        "deployments chat-gateway",
        "poddisruptionbudgets chat-gateway",
        "services chat-engines",
        *["secrets key"] * 3,  # the Secret with the key for gateways, and two Secrets with certificates
    ]
    assert "gateway" not in found.document
    assert found.document["endpoint"] == DIRECT


def test_engines_of_an_earlier_revision_keep_the_secret_that_they_mount():
    found = settled(ONE, previous=STORED, groups=[make_serving(BEHIND)], old=[BEHIND])

    assert made(found) == ["Secret chat-gateway-key", "Service chat-engines"]
    assert "secrets key" not in deleted(found)
    assert found.document["gateway"]["replicas"] == 0


def test_engines_of_an_unknown_revision_have_the_port_only_if_the_status_names_a_gateway():
    strange = make_group(make_pod("strange", route=True), name="chat-ffffffff-0", uid="uid-strange")
    groups = [make_serving(ONE), strange]

    without = settled(ONE, groups=groups)
    assert (made(without), without.status.gateway) == ([], None)
    left = settled(ONE, groups=groups, previous=LEFT)
    assert made(left) == ["Secret chat-gateway-key", "Service chat-engines"]
    assert left.status.gateway.reason == "Off"


def test_a_refusal_keeps_the_gateway_in_the_status():
    found = settled(ONE, previous=STORED)
    refused = status(found.situation, "the API server refused: no")

    assert refused.gateway.replicas == 2


def test_nothing_changes_while_the_spec_cannot_be_used():
    found = turn(None, previous={**STORED, "endpoint": THROUGH}, gateways=(gateway_pod(),), problems=("spec: wrong",))

    assert (made(found), deleted(found)) == ([], [])
    assert (found.status.gateway.replicas, found.status.gateway.ready) == (2, 1)
    assert found.document["endpoint"] == THROUGH


def test_without_kuberay_nothing_of_the_gateway_is_forgotten():
    found = settled(ONE, previous=STORED)
    situation = replace(found.situation, kuberay_problem="The cluster has no KubeRay.")

    assert status(situation).gateway.replicas == 2


@pytest.mark.parametrize(
    ("gateways", "ready", "reason"),
    [
        ((), 0, "Starting"),
        ((gateway_pod(ready=False),), 0, "Starting"),
        ((gateway_pod(), gateway_pod("b", ready=False)), 1, "Starting"),
        ((gateway_pod(), gateway_pod("b")), 2, "Ready"),
        ((gateway_pod(), gateway_pod("b", ready=False, state=waiting("ErrImagePull"))), 1, "ImagePullFailed"),
    ],
)
def test_the_status_counts_gateways_that_take_requests(gateways, ready, reason):
    found = settled(BEHIND, *gateways, previous=STORED).status.gateway

    assert (found.replicas, found.ready, found.reason) == (2, ready, reason)
    assert found.message


def test_a_service_is_available_through_its_gateways():
    found = settled(BEHIND, gateway_pod(), previous={**STORED, "endpoint": THROUGH})

    assert found.document["endpoint"] == THROUGH
    assert conditions(found.document)["Available"] == ("True", "Serving")


def test_without_a_ready_gateway_it_is_not_available_although_an_engine_serves():
    found = settled(BEHIND, gateway_pod(ready=False), previous={**STORED, "endpoint": THROUGH})

    assert found.document["ready"] == "1/1"
    assert conditions(found.document)["Available"] == ("False", "GatewayNotReady")
    assert conditions(found.document)["Degraded"] == ("False", "Healthy")


def test_the_fault_of_a_gateway_pod_is_a_fault_of_the_service():
    broken = gateway_pod(ready=False, state=waiting("ErrImagePull", "no such image"))
    found = settled(BEHIND, broken, previous={**STORED, "endpoint": THROUGH})
    said = {each["type"]: each["message"] for each in found.document["conditions"]}

    assert conditions(found.document)["Available"] == ("False", "ImagePullFailed")
    assert conditions(found.document)["Degraded"] == ("True", "ImagePullFailed")
    assert "Check spec.gateway.image" in said["Degraded"]


def test_one_broken_gateway_of_two_leaves_the_service_available():
    broken = gateway_pod("b", ready=False, state=waiting("ErrImagePull"))
    found = settled(BEHIND, gateway_pod(), broken, previous={**STORED, "endpoint": THROUGH})

    assert conditions(found.document)["Available"] == ("True", "Serving")
    assert conditions(found.document)["Degraded"] == ("True", "ImagePullFailed")


def test_a_running_service_keeps_its_endpoint_until_gateways_reach_every_engine():
    before = {**STORED, "endpoint": DIRECT}
    old = [make_serving(ONE)]

    rolling = settled(BEHIND, gateway_pod(), previous=before, groups=old, old=[ONE])
    assert rolling.document["endpoint"] == DIRECT
    assert conditions(rolling.document)["Available"] == ("True", "Serving")
    starting = settled(BEHIND, gateway_pod(ready=False), previous=before)
    assert starting.document["endpoint"] == DIRECT
    assert conditions(starting.document)["Available"] == ("True", "Serving")
    done = settled(BEHIND, gateway_pod(), previous=before)
    assert done.document["endpoint"] == THROUGH


@pytest.mark.parametrize("wanted", [OFF, BEHIND])
def test_the_status_says_that_no_engine_has_the_port_until_one_of_the_new_revision_serves(wanted):
    rolling = settled(wanted, previous=LEFT, groups=[make_serving(ONE)], old=[ONE])
    starting = make_serving(wanted, reading=make_reading(make_said("starting", None)))
    begun = settled(wanted, previous=LEFT, groups=[make_serving(ONE), starting], old=[ONE])
    reached = settled(wanted, previous=LEFT, groups=[make_serving(ONE), make_serving(wanted)], old=[ONE])
    invalid = turn(None, [make_serving(ONE)], previous=rolling.document, problems=("spec.model: no",))

    assert [each.document["gateway"]["reason"] for each in (rolling, begun, invalid)] == ["NoPort"] * 3
    assert reached.document["gateway"]["reason"] == ("Off" if wanted is OFF else "Starting")


def test_a_suspended_service_is_suspended_with_or_without_gateways():
    none = make_resolved(replicas=0, gateway={})
    found = settled(none, gateway_pod(), previous={**STORED, "endpoint": THROUGH}, groups=[])

    assert conditions(found.document)["Available"] == ("False", "Suspended")


def test_a_status_of_another_version_counts_as_a_gateway_that_may_exist():
    unreadable = settled(ONE, previous={"gateway": {"replicas": "many"}})

    assert deleted(unreadable) == deleted(settled(ONE, previous=STORED))
