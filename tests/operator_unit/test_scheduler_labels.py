"""RayClusters have the labels of their LLMService, which queues and batch schedulers read.

The status names the queued RayClusters.
"""

import pytest

from rayloom_operator.api.spec import Metadata, parse
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.rollout.view import view_of
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.observe.observed import Observed
from rayloom_operator.observe.replicas import is_suspended
from rayloom_operator.observe.verdict import judge
from rayloom_operator.resolve.resolved import resolve
from rayloom_operator.resolve.revision import revision
from rt_operator import NOW, make_group, make_resolved, make_service, turn

QUEUED = {
    "kueue.x-k8s.io/queue-name": "gpus",
    "volcano.sh/queue-name": "gpus",
    "yunikorn.apache.org/queue": "root.gpus",
    "kai.scheduler/queue": "gpus",
    "ray.io/priority-class-name": "high",
    "ray.io/gang-scheduling-enabled": "true",
}


def labelled(labels=None, annotations=None, **spec):
    service = make_service(**spec)
    meta = service.metadata.model_copy(update={"labels": labels or {}, "annotations": annotations or {}})
    return resolve(service.model_copy(update={"metadata": meta}), "rayloom/engine:test")


def metadata_of(resolved, metadata=None):
    return ray_cluster(resolved, "00000000", 0, metadata)["metadata"]


def test_a_raycluster_has_the_labels_of_queues_and_no_others_of_its_service():
    plain = metadata_of(make_resolved())["labels"]

    assert metadata_of(labelled(QUEUED | {"team": "a", "argocd.argoproj.io/instance": "x"}))["labels"] == QUEUED | plain


def test_pods_get_none_of_them_from_the_operator():
    found, plain = (ray_cluster(each, "00000000")["spec"] for each in (labelled(QUEUED), make_resolved()))

    assert found["headGroupSpec"] == plain["headGroupSpec"]
    assert found["workerGroupSpecs"][0]["template"] == plain["workerGroupSpecs"][0]["template"]


def test_without_them_the_object_is_unchanged():
    assert ray_cluster(labelled(), "00000000") == ray_cluster(labelled({"team": "a"}, {"note": "b"}), "00000000")


@pytest.mark.parametrize(
    "label", ["ray.io/cluster", "ray.io/node-type", "ray.io/originated-from-crd", "ray.io/originated-from-cr-name"]
)
def test_labels_by_which_kuberay_finds_objects_are_not_copied(label):
    assert label not in metadata_of(labelled({label: "x"}))["labels"]


def test_annotations_of_queues_are_passed_on_and_kuberays_are_not():
    theirs = {"yunikorn.apache.org/task-groups": "[]", "kueue.x-k8s.io/elastic-job": "false"}
    found = metadata_of(labelled(annotations=theirs | {"ray.io/ft-enabled": "true", "note": "x"}))

    assert found["annotations"] == theirs | {"ray.io/disable-provisioned-head-restart": "true"}


def test_another_queue_rolls_nothing():
    assert revision(labelled(QUEUED)) == revision(labelled({"kueue.x-k8s.io/queue-name": "other"}))
    assert revision(labelled(QUEUED)) == revision(labelled())


def test_an_engine_of_an_earlier_spec_is_made_in_the_queue_of_now():
    now = Metadata(name="chat", labels={"kueue.x-k8s.io/queue-name": "new"})
    then = labelled({"kueue.x-k8s.io/queue-name": "old"})

    assert metadata_of(then, now)["labels"]["kueue.x-k8s.io/queue-name"] == "new"


def test_the_first_engine_is_planned_with_the_labels_of_the_service():
    resolved = labelled({"kueue.x-k8s.io/queue-name": "gpus"})
    planned = turn(resolved).plan
    (cluster,) = (each for each in planned.wanted if each["kind"] == "RayCluster")

    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"


def of_kuberay(kind, status):
    return {"metadata": {"name": "chat-00000000-0"}, "status": {"conditions": [{"type": kind, "status": status}]}}


def test_a_raycluster_that_its_queue_holds_is_suspended():
    assert is_suspended(of_kuberay("RayClusterSuspended", "True"))
    assert is_suspended(of_kuberay("RayClusterSuspending", "True"))
    assert not is_suspended(of_kuberay("RayClusterSuspended", "False"))
    assert not is_suspended({"metadata": {"name": "chat-00000000-0"}})


@pytest.mark.parametrize("is_head_evicted", [False, True])
def test_a_queued_cluster_is_no_fault_and_waits_for_capacity(is_head_evicted):
    # If a RayCluster is suspended after its start, KubeRay deletes its pods.
    group = make_group(is_suspended=True, is_head_evicted=is_head_evicted)
    verdict = judge(group, NOW)
    (engine,) = view_of(Observed(replicas=(group,)), {}, "00000000", mono=NOW).engines

    assert verdict.reason is Reason.PODS_PENDING
    assert verdict.message == (
        "RayCluster chat-00000000-0 is suspended: it has no pods until its queue, such as Kueue's, admits it."
    )
    assert engine.state == "unschedulable"


def test_one_that_lost_its_pods_to_its_queue_is_replaced():
    group = make_group(is_suspended=True, is_headless=True)

    assert judge(group, NOW).reason is Reason.HEAD_LOST


def test_labels_are_read_from_the_document_of_the_api_server():
    document = {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "chat", "namespace": "team", "uid": "u", "creationTimestamp": "x", "labels": QUEUED},
        "spec": {"model": {"source": "builtin://smollm2-135m"}},
    }

    assert parse(document).metadata.labels == QUEUED
