"""The kept part of an object gives the same results as the whole object, and is small."""

import json

import msgspec
import pytest

from rayloom_operator.kube import codec, shapes
from rayloom_operator.names import group_name, revision_of
from rayloom_operator.observe import pods
from rt_operator import crashed, make_pod_document, restarted, waiting

BIG = {"containers": [{"name": "engine", "env": [{"name": "X", "value": "x" * 10_000}]}]}


OOM = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: cpu."}
SEEN = {
    "runs": {},
    "is a worker with a route": {"is_head": False, "route": True, "node": "n2", "ip": "10.0.0.2"},
    "gave up": {"engine": crashed(70, "ranks died")},
    "has no model": {"engine": crashed(78, "no model")},
    "has no image": {"engine": waiting("ImagePullBackOff", "not found")},
    "is mounting": {"engine": waiting("ContainerCreating")},
    "was starved": {"engine": crashed(137) | {"lastState": OOM}},
    "was started again": {"engine": restarted(1) | {"restartCount": 4}},
    "is spent": {"engine": crashed(1) | {"restartCount": 9}},
    "finds no node": {"conditions": [UNSCHEDULABLE], "node": "", "ip": ""},
    "is not ready": {"ready": False},
    "has failed": {"phase": "Failed"},
    "is told to go": {"deletion_grace": 30},
}
FAILED = {"reason": "Evicted", "message": "The node was low on memory."}


def whole_pod(case):
    """A whole Pod as the API server returns it."""
    whole = make_pod_document(**SEEN[case])
    whole["spec"] |= BIG | {"volumes": [{"name": "model", "hostPath": {"path": "/x"}}, {"name": "scratch"}]}
    whole["metadata"]["annotations"] = {"x": "x" * 10_000}
    init = {"name": "wait-gcs-ready", "ready": case != "is mounting", "state": {"running": {}}}
    whole["status"]["initContainerStatuses"] = [init | ({"state": {}} if case == "is mounting" else {})]
    whole["status"] |= FAILED if case == "has failed" else {}
    return whole


def read(whole):
    return shapes.pod(codec.decoded(json.dumps(whole).encode(), shapes.PodFields))


@pytest.mark.parametrize("case", SEEN)
def test_a_pod_reads_the_same_when_it_is_slim(case):
    whole = whole_pod(case)
    kept = read(whole)
    assert pods.pod(kept) == pods.pod(whole)
    assert kept["spec"]["volumes"] == [{"name": "model"}]
    assert len(json.dumps(kept)) < 2000


def endpoint(uid, **conditions):
    return {"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": "x", "uid": uid}, **conditions}


@pytest.mark.parametrize(
    ("endpoints", "uids"),
    [
        (None, []),
        ([], []),
        ([endpoint("a")], ["a"]),
        ([endpoint("a", conditions=None)], ["a"]),
        ([endpoint("a", conditions={"serving": True})], ["a"]),
        ([endpoint("a", conditions={"ready": None})], ["a"]),
        ([endpoint("a", conditions={"ready": True}), endpoint("b", conditions={"ready": False})], ["a"]),
        ([{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"], "targetRef": None}], []),
    ],
)
def test_the_ready_pods_of_an_endpoint_slice_are_kept(endpoints, uids):
    assert read_slice(endpoints, "chat") == {"uids": uids}


def test_an_endpoint_slice_of_another_service_with_our_label_counts_for_no_pod():
    assert read_slice([endpoint("a")], "chat-heads") == {"uids": []}


def read_slice(endpoints, of):
    labels = {"rayloom.dev/service": "chat", "kubernetes.io/service-name": of}
    whole = {"metadata": {"name": "x", "labels": labels}, "endpoints": endpoints, "ports": [{"port": 8000}]}
    return shapes.endpoint_slice(codec.decoded(json.dumps(whole).encode(), shapes.EndpointSliceFields))


@pytest.mark.parametrize("part", ["metadata", "spec", "status"])
def test_a_null_counts_as_a_missing_field(part):
    whole = whole_pod("was started again")
    fields = {
        "metadata": ["deletionTimestamp", "deletionGracePeriodSeconds", "creationTimestamp", "annotations"],
        "spec": ["tolerations", "nodeName", "volumes"],
        "status": ["conditions", "initContainerStatuses", "containerStatuses", "podIP", "message"],
    }[part]
    for field in fields:
        whole[part].pop(field, None)
        without, whole[part][field] = pods.pod(read(whole)), None
        assert pods.pod(read(whole)) == without, field


@pytest.mark.parametrize("tolerations", [[], None, [{"key": "gpu", "operator": "Exists"}]])
def test_a_pod_without_the_toleration_leaves_a_cordoned_node(tolerations):
    assert not pods.pod(read(make_pod_document() | {"spec": {"tolerations": tolerations}})).stays_when_cordoned


@pytest.mark.parametrize("toleration", [{"operator": "Exists"}, {"key": "node.kubernetes.io/unschedulable"}])
def test_a_pod_with_the_toleration_stays_on_a_cordoned_node(toleration):
    assert pods.pod(read(make_pod_document() | {"spec": {"tolerations": [toleration]}})).stays_when_cordoned


def test_metadata_and_conditions_of_a_raycluster_are_kept():
    meta = {"name": "chat-0", "namespace": "team", "uid": "u", "labels": {"a": "b"}, "deletionTimestamp": "now"}
    owner = {"kind": "LLMService", "name": "chat", "uid": "s"}
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "r", "message": "m"}
    whole = {
        "metadata": meta | {"ownerReferences": [owner | {"controller": True}], "annotations": {}},
        "spec": BIG,
        "status": {"conditions": [condition], "head": {}},
    }
    expected = {"metadata": meta | {"ownerReferences": [owner]}, "status": {"conditions": [condition]}}
    assert msgspec.convert(whole, shapes.OwnedFields) == expected
    assert msgspec.convert({"metadata": {"name": "x"}}, shapes.OwnedFields) == {"metadata": {"name": "x"}}


def test_a_revision_is_read_from_the_name_whatever_the_service_is_called():
    assert revision_of(group_name("my-chat-0", "0a1b2c3d", 12)) == "0a1b2c3d"
    assert revision_of("somebodys") == ""
