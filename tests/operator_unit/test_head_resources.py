"""Requests of the head pod's containers, if a pod template sets limits."""

import pytest

from rayloom_operator.api.pod_template.reserved_parts import HEAD_CONTAINERS
from rayloom_operator.objects.ray_cluster import ray_cluster
from rt_operator import make_resolved


def resources_of(name, limits):
    template = {"head": {"spec": {"containers": [{"name": name, "resources": {"limits": limits}}]}}}
    cluster = ray_cluster(make_resolved(podTemplate=template), "00000000")
    containers = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    return next(each["resources"] for each in containers if each["name"] == name)


@pytest.mark.parametrize("name", HEAD_CONTAINERS)
@pytest.mark.parametrize(
    ("limits", "requests"),
    [
        # Kubernetes uses the limit as the request.
        ({"memory": "256Mi"}, {"cpu": "200m"}),
        ({"cpu": "100m"}, {"memory": "512Mi"}),
        ({"cpu": "200m"}, {"cpu": "200m", "memory": "512Mi"}),
        # Two containers that request two cores each would not fit on a node of two cores.
        ({"cpu": "2", "memory": "2Gi"}, {"cpu": "200m", "memory": "512Mi"}),
    ],
)
def test_a_request_of_ours_is_dropped_only_above_a_limit(name, limits, requests):
    assert resources_of(name, limits) == {"requests": requests, "limits": limits}
