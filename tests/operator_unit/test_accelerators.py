"""Engines on accelerators: the resources that pods request, Ray's resources, and the engine's config."""

import json

import pytest

from rayloom_operator.api.spec import parse
from rayloom_operator.errors import SpecError
from rayloom_operator.objects.companions import config_map
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.resolved import resolve
from rt_operator import make_resolved, make_service
from rt_shapes import LLAMA31_8B, LLAMA31_70B

# The model has a cache, so that pods request no disk space of their own.
CACHE = {"persistentVolumeClaim": "models"}
MODEL = {"source": "hf://meta-llama/Llama-3.1-70B-Instruct", "maxModelLen": 131_072, "cache": CACHE}
ACCELERATOR = {"perNode": 8, "memory": "80Gi"}


def make(facts=LLAMA31_70B, **spec):
    return resolve(make_service(**({"model": MODEL, "accelerator": ACCELERATOR} | spec)), "i", facts)


def workers(resolved):
    (group,) = ray_cluster(resolved, "00000000")["spec"]["workerGroupSpecs"]
    return group


def container(resolved):
    (worker,) = workers(resolved)["template"]["spec"]["containers"]
    return worker


def engine_config(resolved):
    return json.loads(config_map(resolved, "00000000")["data"]["config.json"])


def test_a_worker_pod_has_the_accelerators_of_its_ranks_and_ray_knows():
    resolved = make(parallelism={"tensor": 8, "pipeline": 2})
    group = workers(resolved)

    assert group["replicas"] == 2
    assert {name: group["rayStartParams"][name] for name in ("num-cpus", "num-gpus")} == {
        "num-cpus": "8",
        "num-gpus": "8",
    }
    assert container(resolved)["resources"] == {
        "requests": {"cpu": "4000m", "memory": "32Gi", "nvidia.com/gpu": "8"},
        "limits": {"nvidia.com/gpu": "8"},
    }


def test_stages_of_one_pod_are_placed_side_by_side():
    resolved = make(parallelism={"tensor": 2, "pipeline": 4})

    assert workers(resolved)["replicas"] == 1
    assert container(resolved)["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert engine_config(resolved)["ray_placement_strategy"] == "PACK"
    assert "ray_placement_strategy" not in engine_config(make(parallelism={"tensor": 8, "pipeline": 2}))


def test_the_config_names_the_device_because_a_gpu_may_join_ray_later():
    assert engine_config(make())["device"] == "cuda"
    assert engine_config(make_resolved())["device"] == "cpu"
    assert engine_config(make_resolved(engine={"args": {"device": "auto"}}))["device"] == "cpu"
    assert engine_config(make_resolved(engine={"args": {"device": "cuda"}}))["device"] == "cuda"


def test_the_config_has_the_computed_numbers():
    resolved = make(LLAMA31_8B, model={"source": MODEL["source"]}, accelerator={"memory": "24Gi"})
    document = engine_config(resolved)

    assert (document["tensor_parallel_size"], document["pipeline_parallel_size"]) == (1, 1)
    assert document["max_model_len"] == 54_560


def test_other_resources_of_the_user_stay():
    given = {"requests": {"memory": "64Gi"}, "limits": {"cpu": "16", "nvidia.com/gpu": "1"}}
    resources = container(make(engine={"resources": given}))["resources"]

    assert resources == {
        "requests": {"memory": "64Gi", "nvidia.com/gpu": "4"},
        "limits": {"cpu": "16", "nvidia.com/gpu": "4"},
    }


def test_ranks_of_a_pod_have_shared_memory_for_nccl():
    def limit(resolved):
        volumes = workers(resolved)["template"]["spec"]["volumes"]
        return next(each["emptyDir"]["sizeLimit"] for each in volumes if each["name"] == "shared-memory")

    assert limit(make()) == "2560Mi"
    assert limit(make_resolved(parallelism={"tensor": 3})) == "512Mi"
    # Each rank has 1 GiB for copies of KV blocks, and less than a MiB for the header of their file.
    copies = {"engine": {"args": {"kvHostMemoryBytes": 1 << 30}}}
    assert limit(make(**copies)) == f"{2560 + 4 * 1025}Mi"
    assert limit(make_resolved(parallelism={"tensor": 3}, **copies)) == f"{512 + 3 * 1025}Mi"
    assert limit(make(engine={"args": {"kvHostMemoryBytes": 0}})) == "2560Mi"


def test_a_rank_on_a_cpu_requests_the_memory_of_its_weights():
    # The big model needs 15,317 MiB for weights, 384 MiB for the process and 168 MiB for Ray. The small model needs
    # less than the minimum.
    big = resolve(make_service(model=MODEL | {"maxModelLen": 8192}), "i", LLAMA31_8B)

    assert container(big)["resources"]["requests"]["memory"] == "15869Mi"
    assert container(make_resolved())["resources"]["requests"]["memory"] == "1Gi"


def test_ranks_request_the_host_memory_of_their_copies_of_kv_blocks():
    copies = {"engine": {"args": {"kvHostMemoryBytes": 1 << 30}}}
    assert container(make_resolved(**copies))["resources"]["requests"]["memory"] == "2049Mi"
    assert container(make(**copies))["resources"]["requests"]["memory"] == f"{4 * (4096 + 1025)}Mi"
    document = engine_config(make(**copies))
    assert document["kv_host_memory_bytes"] == 1 << 30


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"accelerator": {"perNode": 4, "memory": "80Gi"}, "parallelism": {"tensor": 8}},
            "spec: tensor 8 is more than perNode 4; the ranks of a stage share a node: lower parallelism.tensor, or "
            "raise accelerator.perNode",
        ),
        (
            {"accelerator": {"memory": "80Gi"}, "engine": {"args": {"device": "cpu"}}},
            "spec: engine.args.device cpu has no use for an accelerator: remove one of the two",
        ),
        (
            {"accelerator": {"memory": "80Gi"}, "engine": {"args": {"quantization": "int8"}}},
            "spec: engine.args.quantization int8 works on CPU only: remove it, or remove accelerator and "
            "engine.args.device cuda, as far as they are set",
        ),
        (
            {"sizing": {"minConcurrentRequests": 0}},
            "spec.sizing.minConcurrentRequests: 0 is too small; use 1 or more",
        ),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(spec, sentence):
    document = {"apiVersion": "rayloom.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": "chat"}}

    with pytest.raises(SpecError) as caught:
        parse(document | {"spec": {"model": MODEL, **spec}})
    assert caught.value.problems == (sentence,)
