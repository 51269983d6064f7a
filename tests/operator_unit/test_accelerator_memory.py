"""If the manifest omits spec.accelerator.memory, the operator reads it from the nodes' labels, once for each sizing.

An 8B model fits on a GPU of 24,564 MiB with a shorter context, and on a GPU of 81,559 MiB with the full context.
"""

import asyncio

import pytest

from rayloom_operator.api.accelerator_memory import MAX_MIB, AcceleratorNode, node_memory
from rayloom_operator.api.sizing import Accelerator
from rayloom_operator.api.sizing_status import SizingStatus
from rayloom_operator.api.status import InspectedModel
from rayloom_operator.errors import MemoryUnknown, SpecError
from rayloom_operator.objects.old_spec import old_spec, resolved_of
from rayloom_operator.observe.nodes import Nodes
from rayloom_operator.reconcile.gather import spec_reader
from rayloom_operator.resolve.resolved import Hub, resolve
from rayloom_operator.resolve.revision import revision
from rt_operator import make_service
from rt_shapes import LLAMA31_8B
from rt_world import service, with_world

GPU = "nvidia.com/gpu"
MIB = 1 << 20
HUB = {"source": "hf://a/b"}
GIVE_IT = "give spec.accelerator.memory, such as 80Gi"


def make_node(name="n1", memory=24_564, resource=GPU, **labels):
    own = {} if memory is None else {f"{resource}.memory": str(memory)}
    return AcceleratorNode(name=name, labels=own | labels, resources=frozenset({resource}))


def memory(*nodes, selector=None, **accelerator):
    return node_memory(nodes, Accelerator.model_validate(accelerator), selector or {})


def test_the_memory_is_the_least_of_all_nodes_that_could_run_a_pod():
    assert memory(make_node("a", 81_559), make_node("b", 24_564)).num_bytes == 24_564 * MIB


def test_nodes_without_the_labels_of_the_selector_do_not_count():
    nodes = make_node("a", 81_559, pool="big"), make_node("b", 24_564), make_node("c", None)

    assert memory(*nodes, selector={"pool": "big"}).num_bytes == 81_559 * MIB


def test_another_resource_has_labels_of_its_own():
    mig = "nvidia.com/mig-1g.10gb"

    assert memory(make_node(memory=81_559), make_node("b", 9728, mig), resource=mig).num_bytes == 9728 * MIB


@pytest.mark.parametrize(
    ("nodes", "selector", "why_not"),
    [
        ((), {}, f"no node has nvidia.com/gpu: add one, or {GIVE_IT}"),
        (
            (make_node(),),
            {"pool": "big"},
            f"no node has nvidia.com/gpu and the labels of scheduling.nodeSelector: add one, or {GIVE_IT}",
        ),
        (
            (make_node("a"), make_node("b", None)),
            {},
            "node b has nvidia.com/gpu and no label nvidia.com/gpu.memory, which GPU feature discovery sets: install "
            f"it, or {GIVE_IT}",
        ),
        (
            (make_node("c", None), make_node("b", None), make_node("a", "much")),
            {},
            "node a (and 2 more) has nvidia.com/gpu and no label nvidia.com/gpu.memory, which GPU feature discovery "
            f"sets: install it, or {GIVE_IT}",
        ),
        (
            (make_node("a", **{f"{GPU}.replicas": "4"}),),
            {},
            "node a shares each nvidia.com/gpu among several pods (nvidia.com/gpu.replicas), so its label "
            f"nvidia.com/gpu.memory gives more memory than a single pod may use: {GIVE_IT}",
        ),
    ],
)
def test_an_unknown_memory_has_a_reason_with_the_cure(nodes, selector, why_not):
    assert memory(*nodes, selector=selector) == (type(memory())(None, why_not))


@pytest.mark.parametrize("label", ["9" * 40, "9" * 5000, str(MAX_MIB + 1), "0", "-1", "\u0663\u0664", "1e3"])
def test_a_label_with_an_impossible_amount_counts_as_missing(label):
    found = memory(make_node("a"), make_node("b", label))

    assert found.num_bytes is None
    assert found.why_not.startswith("node b has nvidia.com/gpu and no label nvidia.com/gpu.memory")


def test_the_largest_amount_fits_into_a_status():
    assert memory(make_node(memory=MAX_MIB)).num_bytes == 1 << 60
    field = SizingStatus.model_json_schema(by_alias=True)["properties"]["acceleratorMemory"]["anyOf"][0]
    assert field["maximum"] == 1 << 60


def test_a_device_that_is_not_shared_has_one_replica():
    assert memory(make_node("a", **{f"{GPU}.replicas": "1"})).num_bytes == 24_564 * MIB


def service_without(model=HUB, **spec):
    return make_service(model=model, **({"accelerator": {"resource": GPU}} | spec))


def resolved(service, *nodes, previous=None):
    def of_nodes(accelerator, selector):
        return node_memory(nodes, accelerator, selector)

    return resolve(service, "i", LLAMA31_8B, previous or {}, Hub(), of_nodes)


def written(found):
    return {"sizing": found.sizing.model_dump(mode="json", by_alias=True, exclude_none=True)}


def test_the_memory_of_the_labels_is_used_for_the_sizing_and_stored():
    found = resolved(service_without(), make_node(memory=24_564))
    given = resolve(service_without(accelerator={"memory": "24564Mi"}), "i", LLAMA31_8B)

    assert revision(found) == revision(given)
    assert found.sizing.accelerator_memory == 24_564 * MIB
    assert found.sizing.accelerator_nodes == GPU
    assert (given.sizing.accelerator_memory, given.sizing.accelerator_nodes) == (None, None)
    assert found.sizing.inputs == given.sizing.inputs


def test_a_new_node_does_not_change_running_engines():
    service = service_without()
    before = resolved(service, make_node(memory=24_564))
    status = written(before)
    after = resolved(service, make_node(memory=81_559), previous=status)
    without = resolved(service, previous=status)

    assert revision(before) == revision(after) == revision(without)
    assert after.sizing == without.sizing == before.sizing


@pytest.mark.parametrize(
    "spec",
    [
        {"scheduling": {"nodeSelector": {"pool": "big"}}},
        {"model": HUB | {"maxModelLen": 131_072}},
        {"accelerator": {"resource": GPU, "perNode": 8}},
    ],
)
def test_a_change_of_the_sizing_or_of_the_node_selector_reads_the_labels_again(spec):
    status = written(resolved(service_without(), make_node(memory=24_564)))
    after = resolved(service_without(**spec), make_node(memory=81_559, pool="big"), previous=status)

    assert after.sizing.accelerator_memory == 81_559 * MIB


def test_removing_a_memory_that_equals_the_labels_rolls_nothing():
    given = resolve(service_without(accelerator={"memory": "24564Mi"}), "i", LLAMA31_8B)
    after = resolved(service_without(), make_node(memory=24_564), previous=written(given))

    assert revision(after) == revision(given)


def test_engines_of_an_old_revision_are_recreated_with_their_old_sizing():
    model = InspectedModel(source="hf://a/b", revision="", **dict(LLAMA31_8B))
    found = resolved(service_without(), make_node(memory=24_564))
    document = {"metadata": {"name": "chat", "namespace": "team", "uid": "uid-1"}}
    read = resolved_of(old_spec(found, revision(found), model), document, Hub())

    assert (read.sizing.accelerator_memory, revision(read)) == (24_564 * MIB, revision(found))


def test_an_unknown_memory_is_an_error_that_names_the_field():
    with pytest.raises(MemoryUnknown) as caught:
        resolved(service_without())
    assert caught.value.problems == (
        f"spec.accelerator.memory is left out, and no node has nvidia.com/gpu: add one, or {GIVE_IT}",
    )
    with pytest.raises(SpecError, match="without a cluster there are no node labels to read it from"):
        resolve(service_without(), "i", LLAMA31_8B)


def node_document(name, *, labels=None, allocatable=None):
    ready = {"type": "Ready", "status": "True"}
    return {
        "metadata": {"name": name, "labels": labels or {}, "annotations": {"much": "text"}},
        "spec": {},
        "status": {"conditions": [ready], "allocatable": allocatable or {}, "images": [{"names": ["x"]}]},
    }


def test_labels_are_kept_only_of_nodes_with_devices():
    from rayloom_operator.observe.nodes import _slim, accelerators_of

    label = {f"{GPU}.memory": "24564", "zone": "a"}
    gpu = node_document("g", labels=label, allocatable={"cpu": "8", GPU: "2", "nvidia.com/mig-1g.5gb": "0"})
    plain = node_document("c", labels={"zone": "a"}, allocatable={"cpu": "8", "hugepages-2Mi": "0"})

    assert accelerators_of(_slim(gpu)) == AcceleratorNode(name="g", labels=label, resources={GPU})
    assert accelerators_of(plain) is None
    assert _slim(plain)["metadata"] == {"name": "c"}


class Listed:
    """A reflector with these nodes in its cache."""

    def __init__(self, *documents):
        self.documents = {each["metadata"]["name"]: each for each in documents}
        self.is_synced = asyncio.Event()

    def of_service(self, key):
        return [self.documents[key[1]]] if key[1] in self.documents else []


def test_the_memory_follows_the_nodes_once_all_are_listed():
    nodes = Nodes(None, lambda name: None)
    nodes.reflector = Listed(node_document("g", labels={f"{GPU}.memory": "24564"}, allocatable={GPU: "1"}))
    ask = Accelerator()
    nodes._changed(("", "g"))
    assert "has not listed the cluster's nodes" in nodes.memory_of(ask, {}).why_not
    nodes.reflector.is_synced.set()
    assert nodes.memory_of(ask, {}).num_bytes == 24_564 * MIB
    del nodes.reflector.documents["g"]
    nodes._changed(("", "g"))
    assert "no node has nvidia.com/gpu" in nodes.memory_of(ask, {}).why_not


def test_a_service_waits_for_the_label_until_a_node_has_it(monkeypatch):
    def node(**labels):
        found = node_document("gpu-1", labels=labels, allocatable={GPU: "1"})
        found["metadata"]["namespace"] = ""
        return {"apiVersion": "v1", "kind": "Node", **found}

    async def story(world):
        world.kube.put(node())
        world.ask_for(service(accelerator={"resource": GPU}))
        await world.until(lambda: world.reason("Accepted") == "InvalidSpec")
        assert world.message() == (
            "spec.accelerator.memory is left out, and node gpu-1 has nvidia.com/gpu and no label "
            f"nvidia.com/gpu.memory, which GPU feature discovery sets: install it, or {GIVE_IT}"
        )
        assert world.kube.named("RayCluster") == []
        world.kube.put(node(**{f"{GPU}.memory": "24564"}))
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.until(lambda: world.reason("Accepted") == "Valid")
        assert world.kube.statuses[-1]["sizing"]["acceleratorMemory"] == 24_564 * MIB

    monkeypatch.setattr(spec_reader, "_NODE_LABELS_S", 0.01)
    with_world(story)
