"""Objects of a gateway that somebody else has changed, and objects that the API server stores in another form."""

import copy

import msgspec
import pytest

from rayloom_operator.objects.companions import client_service, service_account
from rayloom_operator.objects.gateway.companions import (
    engines_service,
    gateway_budget,
    gateway_secret,
    gateway_service,
)
from rayloom_operator.objects.gateway.deployment import gateway_deployment
from rayloom_operator.objects.secret_digest import with_digest_of, without_digest
from rayloom_operator.observe.applied_fields import SHAPES
from rayloom_operator.observe.drift import Drift
from rt_fake_kube import FakeKube
from rt_operator import make_resolved

KEY = ("team", "chat")
BEHIND = make_resolved(
    gateway={"replicas": 2, "resources": {"limits": {"cpu": "2"}}},
    auth={"apiKeySecretRef": {"name": "keys", "key": "all"}},
    scheduling={"nodeSelector": {"zone": "a"}, "priorityClassName": "high"},
    engine={"imagePullSecrets": [{"name": "registry"}]},
)
SERVICE = BEHIND.service
DEPLOYMENT = gateway_deployment(BEHIND, SERVICE.spec.gateway)
OPERATOR_KEY = b"k" * 16
ENGINES = with_digest_of([gateway_secret(SERVICE, OPERATOR_KEY)], engines_service(SERVICE), OPERATOR_KEY)
ACCOUNT = with_digest_of([gateway_secret(SERVICE, OPERATOR_KEY)], service_account(SERVICE), OPERATOR_KEY)


def as_returned(manifest):
    """The object with the fields that the API server and the controllers add."""
    found = copy.deepcopy(manifest)
    found["metadata"] |= {"uid": f"uid-{manifest['metadata']['name']}", "resourceVersion": "7", "generation": 1}
    theirs = {"Service": "metallb.io/ip-allocated-from-pool", "ServiceAccount": "eks.amazonaws.com/role-arn"}
    if found["kind"] in theirs:
        found["metadata"].setdefault("annotations", {})[theirs[found["kind"]]] = "default"
    if found["kind"] != "Deployment":
        return found
    found["metadata"]["annotations"] = {"deployment.kubernetes.io/revision": "1"}
    spec = found["spec"]
    spec["progressDeadlineSeconds"] = 600
    pod = spec["template"]["spec"]
    pod |= {"dnsPolicy": "ClusterFirst", "restartPolicy": "Always", "schedulerName": "default-scheduler"}
    pod["serviceAccount"] = pod["serviceAccountName"]
    for volume in pod["volumes"]:
        for kind in ("projected", "secret"):
            if kind in volume:
                volume[kind]["defaultMode"] = 420
    (config,) = [each for each in pod["volumes"] if each["name"] == "config"]
    config["projected"]["sources"][0]["downwardAPI"]["items"][0]["fieldRef"]["apiVersion"] = "v1"
    (container,) = pod["containers"]
    container["terminationMessagePath"] = "/dev/termination-log"
    for probe in ("readinessProbe", "livenessProbe"):
        container[probe] |= {"successThreshold": 1}
        container[probe]["httpGet"]["scheme"] = "HTTP"
    return found | {"status": {"readyReplicas": 2}}


def is_right(manifest, found):
    drift = Drift(FakeKube(), lambda _: None)
    kind = manifest["kind"]
    (reflector,) = [each for each in drift.reflectors if each._kind == kind]
    reflector.take("ADDED", msgspec.convert(found, SHAPES[kind]))
    return drift.is_right(KEY, manifest, drift.take_listed(KEY))


@pytest.mark.parametrize(
    "manifest",
    [
        DEPLOYMENT,
        gateway_service(SERVICE),
        service_account(SERVICE),
        ENGINES,
        ACCOUNT,
        gateway_budget(SERVICE, SERVICE.spec.gateway),
    ],
    ids=lambda each: f"{each['kind']} {each['metadata']['name']}",
)
def test_defaults_of_the_api_server_are_right(manifest):
    assert is_right(manifest, as_returned(manifest))


def test_the_digest_has_every_field_of_the_deployment():
    kept = msgspec.convert(DEPLOYMENT, SHAPES["Deployment"])

    assert {"apiVersion": "apps/v1", "kind": "Deployment", **kept} == DEPLOYMENT


POD = ("spec", "template", "spec")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "replicas"), 5),
        (("spec", "strategy", "rollingUpdate", "maxUnavailable"), 1),
        ((*POD, "serviceAccountName"), "default"),
        ((*POD, "containers", 0, "image"), "strange/gateway:1"),
        ((*POD, "containers", 0, "command"), ["sleep", "60"]),
        ((*POD, "containers", 0, "args"), ["--no-key"]),
        ((*POD, "containers", 0, "env"), [{"name": "LD_PRELOAD", "value": "/tmp/x"}]),
        ((*POD, "containers", 0, "readinessProbe", "httpGet", "path"), "/version"),
        ((*POD, "securityContext", "runAsNonRoot"), False),
        ((*POD, "volumes", 0, "projected", "sources", 1, "secret", "name"), "other"),
        (("spec", "template", "metadata", "annotations", "rayloom.dev/gateway-config"), "{}"),
    ],
)
def test_an_edit_while_no_operator_ran_is_not_right(place, value):
    found = as_returned(DEPLOYMENT)
    part = found
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    assert not is_right(DEPLOYMENT, found)


@pytest.mark.parametrize("holder", [engines_service(SERVICE), service_account(SERVICE)], ids=lambda each: each["kind"])
def test_an_object_without_the_digest_of_the_wanted_secrets_is_not_right(holder):
    wanted, other = (with_digest_of([gateway_secret(SERVICE, key)], holder, key) for key in (OPERATOR_KEY, b"o" * 16))
    for found in (other, without_digest(wanted), holder):
        assert not is_right(wanted, as_returned(found))
    assert is_right(wanted, as_returned(wanted))


def test_the_status_of_a_deployment_is_no_drift_and_another_number_of_pods_is():
    drift = Drift(FakeKube(), lambda _: None)
    found = as_returned(DEPLOYMENT)
    (reflector,) = [each for each in drift.reflectors if each._kind == "Deployment"]
    drift.wrote(KEY, found)
    found["metadata"]["resourceVersion"] = "8"
    reflector.take("MODIFIED", copy.deepcopy(found))
    assert not drift.take(KEY)
    found["metadata"] |= {"resourceVersion": "9", "generation": 2}
    reflector.take("MODIFIED", found)
    assert drift.take(KEY)


def test_several_services_of_one_llmservice_are_told_apart():
    drift = Drift(FakeKube(), lambda _: None)
    for manifest in (client_service(SERVICE), gateway_service(SERVICE)):
        drift.wrote(KEY, as_returned(manifest))

    assert drift.uid_of_ours(KEY, "Service", "chat") == "uid-chat"
    assert drift.uid_of_ours(KEY, "Service", "chat-gateway") == "uid-chat-gateway"
    assert drift.uid_of_ours(KEY, "Service", "chat-engines") is None
