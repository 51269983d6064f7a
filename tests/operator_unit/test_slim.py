"""What is kept of an object says the same as the whole of it, and is small."""

import copy
import json

import msgspec
import pytest

from rayloom_operator import observed, slim
from rayloom_operator.names import group_name, revision_of
from rt_operator import crashed, make_pod_document

BIG = {"containers": [{"name": "engine", "env": [{"name": "X", "value": "x" * 10_000}]}]}


@pytest.mark.parametrize("engine", [{}, crashed(70, "ranks died"), crashed(78, "no model")])
def test_a_pod_reads_the_same_when_it_is_slim(engine):
    whole = make_pod_document(engine=engine)
    whole["spec"] |= BIG | {"volumes": [{"name": "model", "hostPath": {"path": "/x"}}, {"name": "scratch"}]}
    whole["metadata"]["annotations"] = {"x": "x" * 10_000}
    before = copy.deepcopy(whole)
    kept = slim.pod(msgspec.convert(whole, slim.Pod))
    assert observed.pod(kept) == observed.pod(before)
    assert whole == before
    assert kept["spec"]["volumes"] == [{"name": "model"}]
    assert len(json.dumps(kept)) < 2000


def test_of_a_cluster_its_metadata_and_conditions_are_kept():
    meta = {"name": "chat-0", "namespace": "team", "uid": "u", "labels": {"a": "b"}, "deletionTimestamp": "now"}
    owner = {"kind": "LLMService", "name": "chat", "uid": "s"}
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "r", "message": "m"}
    whole = {
        "metadata": meta | {"ownerReferences": [owner | {"controller": True}], "annotations": {}},
        "spec": BIG,
        "status": {"conditions": [condition], "head": {}},
    }
    expected = {"metadata": meta | {"ownerReferences": [owner]}, "status": {"conditions": [condition]}}
    assert msgspec.convert(whole, slim.Owned) == expected
    assert msgspec.convert({"metadata": {"name": "x"}}, slim.Owned) == {"metadata": {"name": "x"}}


def test_a_revision_is_read_from_the_name_whatever_the_service_is_called():
    assert revision_of(group_name("my-chat-0", "0a1b2c3d", 12)) == "0a1b2c3d"
    assert revision_of("somebodys") == ""
