"""The pod templates of a RayCluster whose service has `spec.podTemplate`."""

from rayloom_operator.objects.ray_cluster import ray_cluster
from rt_operator import make_resolved

REVISION = "00000000"


def templates(resolved):
    """The pod templates in the RayCluster: head, worker."""
    spec = ray_cluster(resolved, REVISION)["spec"]
    (workers,) = spec["workerGroupSpecs"]
    return spec["headGroupSpec"]["template"], workers["template"]


def build(head=None, worker=None, **spec):
    given_templates = {"head": head or {}, "worker": worker or {}}
    return templates(make_resolved(podTemplate=given_templates, **spec))


def by_name(template, kind="containers"):
    return {each["name"]: each for each in template["spec"].get(kind, ())}


def variables(container):
    assert len({each["name"] for each in container["env"]}) == len(container["env"])
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
