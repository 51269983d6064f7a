"""The chart on a real API server: installation, upgrade and removal by Helm while services run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from local_kubernetes.install import NAMESPACE, RELEASE, helm
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.shell import run
from operator_processes.chart import CHART, install_chart, uninstall_chart
from operator_processes.process import wait_until
from real_api_server.world import LLM, World

Make = Callable[..., dict[str, Any]]

_CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/llmservices.rayloom.dev"

# An operator of another version, which builds the objects of an engine replica differently.
_OTHER_BUILDER = """
import sys
from rayloom_operator.objects import ray_cluster
built = ray_cluster.ray_cluster
def other(*args, **options):
    cluster = built(*args, **options)
    cluster["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]["built-by"] = "another"
    return cluster
ray_cluster.ray_cluster = other
from rayloom_operator.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def alone(world: World) -> Iterator[None]:
    """Ensures that before and after the test the chart is installed and no operator runs."""
    world.stop_operators()
    yield
    world.stop_operators()
    install_chart(world.kubeconfig)


def _uids(world: World, namespace: str, name: str) -> set[str]:
    clusters = world.objects(namespace, name, "rayclusters").values()
    return {each["metadata"]["uid"] for each in [*world.pods(namespace, name), *clusters]}


def test_it_lints_and_renders() -> None:
    run(helm(), "lint", "--strict", CHART)
    assert "kind: Deployment" in run(helm(), "template", RELEASE, CHART, "--namespace", NAMESPACE)


def test_an_upgrade_with_another_default_image_and_another_builder_rolls_nothing(
    world: World, alone: None, namespace: str, manifest: Make
) -> None:
    world.create(manifest())
    first = world.start_operator("--engine-image=rayloom/engine:1")
    world.wait_serving(namespace, "chat")
    before = _uids(world, namespace, "chat")
    first.stop()
    install_chart(world.kubeconfig, "engine.image=rayloom/engine:2", "logLevel=debug")
    engine = world.newest_engine(namespace, "chat")
    asked = engine.num_asked
    world.start_operator("--engine-image=rayloom/engine:2", command=(sys.executable, "-c", _OTHER_BUILDER))
    # The pods of a new service prove that the new operator reconciles, with its new image and builder.
    world.create(manifest("later"))
    world.wait_serving(namespace, "later")
    heads = {each["metadata"]["labels"].get("built-by") for each in world.pods(namespace, "later")}
    images = {each["spec"]["containers"][0]["image"] for each in world.pods(namespace, "later")}
    assert (heads, images) == ({"another"}, {"rayloom/engine:2"})
    wait_until(lambda: engine.num_asked > asked, "the new operator to poll the old engine", story=world.story)
    assert _uids(world, namespace, "chat") == before
    # A new revision of a service also gets the new default image.
    world.create(manifest(engine={"args": {"threads": 2}}, rollout={"analysis": {"holdSeconds": 0}}))
    world.wait_serving(namespace, "chat")
    wait_until(lambda: not _uids(world, namespace, "chat") & before, "the old engine to go", story=world.story)
    assert {each["spec"]["containers"][0]["image"] for each in world.pods(namespace, "chat")} == {"rayloom/engine:2"}


def test_a_group_lost_after_an_upgrade_comes_back_with_the_image_that_it_had(
    world: World, alone: None, namespace: str, manifest: Make
) -> None:
    world.create(manifest())
    first = world.start_operator("--engine-image=rayloom/engine:1")
    world.wait_serving(namespace, "chat")
    first.stop()
    world.start_operator("--engine-image=rayloom/engine:2")
    (cluster,) = world.objects(namespace, "chat", "rayclusters").values()
    world.request("DELETE", f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{cluster['metadata']['name']}")
    world.wait_replaced(namespace, "chat", {cluster["metadata"]["uid"]})
    assert {each["spec"]["containers"][0]["image"] for each in world.pods(namespace, "chat")} == {"rayloom/engine:1"}


def test_an_uninstalled_chart_leaves_services_and_strands_no_namespace(
    world: World, kubectl: Kubectl, alone: None, namespace: str, manifest: Make
) -> None:
    world.create(manifest())
    first = world.start_operator()
    world.wait_serving(namespace, "chat")
    before = _uids(world, namespace, "chat")
    first.stop()
    uninstall_chart(world.kubeconfig)
    # The CRD, the service and its engine belong to users and are not removed.
    assert world.get(_CRD) is not None
    assert world.get(f"{LLM}/namespaces/{namespace}/llmservices/chat") is not None
    assert _uids(world, namespace, "chat") == before
    # The deletion takes long: the namespace controller waits for half of a pod's grace period before it checks the
    # namespace again.
    kubectl("delete", "namespace", namespace, "--timeout=180s", timeout_s=190)


def test_an_installation_after_that_takes_over_what_runs(
    world: World, alone: None, namespace: str, manifest: Make
) -> None:
    world.create(manifest())
    first = world.start_operator()
    world.wait_serving(namespace, "chat")
    before = _uids(world, namespace, "chat")
    first.stop()
    world.stop_operators()  # removing the chart deletes the ServiceAccount, so the next operator gets a new token
    uninstall_chart(world.kubeconfig)
    install_chart(world.kubeconfig)
    second = world.start_operator()
    # The chart keeps the operator's key: the engine refuses tokens that are derived from another key.
    engine = world.newest_engine(namespace, "chat")
    asked = engine.num_asked
    wait_until(lambda: engine.num_asked > asked and second.proxy.log, "the engine to be asked", story=world.story)
    world.create(manifest("later"))
    world.wait_serving(namespace, "later")
    assert _uids(world, namespace, "chat") == before
    assert world.condition(namespace, "chat", "Available")["status"] == "True"
