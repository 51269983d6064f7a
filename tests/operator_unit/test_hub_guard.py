"""`envFrom` sets HF_ENDPOINT only if the operator's settings allow manifests to name a hub."""

import pytest

from rayloom_operator.objects.inspect_job import inspect_job
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.resolved import Hub, resolve
from rt_operator import make_service

ENDPOINT = "https://huggingface.co"
FROM = {"envFrom": [{"configMapRef": {"name": "c"}}]}
TOKEN = {"name": "token", "key": "token"}


def endpoints(hub, *, has_token=True):
    """Returns HF_ENDPOINT of each of the operator's containers, in head, worker and inspection."""
    model = {"source": "hf://a/b"} | ({"tokenSecretRef": TOKEN} if has_token else {})
    template = {
        "head": {"spec": {"containers": [{"name": "engine", **FROM}]}},
        "worker": {"spec": {"containers": [{"name": "ray-worker", **FROM}]}},
    }
    service = make_service(model=model, podTemplate=template)
    spec = ray_cluster(resolve(service, "i", hub=hub), "abcd", 0)["spec"]
    pods = (
        spec["headGroupSpec"]["template"]["spec"],
        spec["workerGroupSpecs"][0]["template"]["spec"],
        inspect_job(service, "i", hub, 0)["spec"]["template"]["spec"],
    )
    containers = [each for pod in pods for each in pod["containers"] if "envFrom" in each]
    return [
        next((each["value"] for each in container["env"] if each["name"] == "HF_ENDPOINT"), None)
        for container in containers
    ]


@pytest.mark.parametrize(
    ("hub", "has_token", "found"),
    [
        (Hub(), True, ENDPOINT),
        (Hub(), False, None),
        (Hub(allows_own=True), True, None),
        (Hub(endpoint="https://mirror"), True, "https://mirror"),
    ],
)
def test_a_token_goes_to_the_hub_alone_unless_others_are_allowed(hub, has_token, found):
    assert endpoints(hub, has_token=has_token) == [found] * 3
