"""Every manifest in examples/ is valid and has the number of ranks in its comment."""

import pytest

from rayloom_operator.api.manifest import load_service
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.resolved import resolve
from rt_examples import FOLDER, of_services

FACTS = {
    "hf://Qwen/Qwen3-8B": "qwen3-8b",
    "hf://Qwen/Qwen2.5-72B-Instruct": "qwen2.5-72b",
}


def resolved(name, **changes):
    service = load_service(FOLDER / f"{name}.yaml")
    service = service.model_copy(update={"spec": service.spec.model_copy(update=changes)})
    facts = builtin_facts(service.spec.model)
    if (name := FACTS.get(service.spec.model.source)) is not None:
        facts = ModelFacts.model_validate_json((FOLDER / "facts" / f"{name}.json").read_bytes())
    return resolve(service, "rayloom/engine", facts)


@pytest.mark.parametrize("name", [path.stem for path in of_services()])
def test_every_example_gives_pods(name):
    found = resolved(name)

    (workers,) = ray_cluster(found, "00000000")["spec"]["workerGroupSpecs"]
    assert workers["replicas"] == found.num_pods


def test_one_gpu_of_24_gib_holds_the_8b_model_and_a_request():
    found = resolved("qwen3-8b-gpu")

    assert (found.shape, found.sizing.kv_tokens, found.sizing.concurrent_requests) == ("TP1xPP1", 50_128, 1)


def test_two_nodes_of_eight_gpus_hold_the_72b_model_and_its_64_requests():
    found = resolved("qwen2.5-72b-tp8-pp2")
    spec = found.service.spec
    computed = resolved("qwen2.5-72b-tp8-pp2", parallelism=type(spec.parallelism)())
    smaller = spec.sizing.model_copy(update={"min_concurrent_requests": 32})
    one_node = resolved("qwen2.5-72b-tp8-pp2", parallelism=type(spec.parallelism)(), sizing=smaller)

    assert (found.shape, found.num_pods, found.sizing.nodes) == ("TP8xPP2", 2, 2)
    assert (computed.shape, computed.stages_per_pod) == (found.shape, found.stages_per_pod)
    assert (one_node.shape, one_node.sizing.nodes) == ("TP8xPP1", 1)
