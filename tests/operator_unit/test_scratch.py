"""A pod that downloads or converts its model into its own scratch volume requests disk space for the model.

The expected size: 141,107,412,992 bytes of weights and a twentieth more are 148,162,783,641 bytes or 141,300 MiB, plus
1,024 MiB.
"""

import pytest

from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.api.status import Reason
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.objects.scratch import scratch_volume
from rayloom_operator.resolve.resolved import resolve
from rayloom_operator.resolve.revision import revision
from rt_operator import make_pod, make_resolved, make_service
from rt_shapes import LLAMA31_8B, LLAMA31_70B

HUB, CACHE = {"source": "hf://meta-llama/Llama-3.1-70B-Instruct"}, {"cache": {"persistentVolumeClaim": "models"}}
GPU = {"perNode": 8, "memory": "80Gi"}
REQUEST_70B, LIMIT_70B = "142324Mi", "284648Mi"  # 139 GiB, and twice as much


def pods(facts=LLAMA31_70B, **spec):
    """The specs of the head and the worker pod."""
    spec = {"model": HUB, "accelerator": GPU} | spec
    found = ray_cluster(resolve(make_service(**spec), "i", facts), "00000000")["spec"]
    return found["headGroupSpec"]["template"]["spec"], found["workerGroupSpecs"][0]["template"]["spec"]


def disk(pod, container, volume):
    """(request, limit, sizeLimit of the volume)."""
    resources = next(each["resources"] for each in pod["containers"] if each["name"] == container)
    folder = next(each["emptyDir"] for each in pod["volumes"] if each["name"] == volume)
    name = "ephemeral-storage"
    return resources["requests"].get(name), resources.get("limits", {}).get(name), folder.get("sizeLimit")


def of_worker(**changes):
    return disk(pods(**changes)[1], "ray-worker", "scratch")


def of_head(**changes):
    return disk(pods(**changes)[0], "engine", "engine-scratch")


def test_a_worker_that_downloads_requests_the_weights_and_a_margin():
    assert of_worker() == (REQUEST_70B, None, LIMIT_70B)


def test_each_pod_of_two_stages_fetches_all_of_it():
    assert of_worker(parallelism={"tensor": 8, "pipeline": 2}) == (REQUEST_70B, None, LIMIT_70B)


def test_the_head_of_a_hubs_model_fetches_no_weights():
    assert of_head() == (None, None, None)


def test_an_8b_model_in_float32_takes_the_bytes_of_the_checkpoint():
    # 16,060,522,496 bytes and a twentieth are 16,082 MiB. The type of the computation has no effect.
    model = {"source": "hf://meta-llama/Llama-3.1-8B-Instruct", "dtype": "float32"}

    assert of_worker(facts=LLAMA31_8B, model=model) == ("17107Mi", None, "34214Mi")


@pytest.mark.parametrize(
    "spec",
    [
        {"model": HUB | CACHE},
        {"model": HUB | {"cache": {"hostPath": "/var/models"}}},
        {"model": {"source": "pvc://models/llama"}},
        {"model": {"source": "file:///models/llama"}},
        {"engine": {"env": [{"name": "HF_HUB_CACHE", "value": "/elsewhere"}]}},
        {"model": {"source": "pvc://models/a.gguf"}, "engine": {"env": [{"name": "RAYLOOM_CACHE", "value": "/x"}]}},
    ],
)
def test_a_pod_that_writes_nothing_into_scratch_requests_nothing(spec):
    assert of_worker(**spec) == of_head(**spec) == (None, None, None)


def test_a_folder_that_the_pod_template_names_is_not_scratch():
    def of_template(pod, container, name):
        variable = {"name": name, "value": "/elsewhere"}
        return {pod: {"spec": {"containers": [{"name": container, "env": [variable]}]}}}

    assert of_worker(podTemplate=of_template("worker", "ray-worker", "HF_HOME")) == (None, None, None)
    # The ranks download the model, and no variable of another container changes the folder.
    assert of_worker(podTemplate=of_template("head", "engine", "HF_HOME")) == (REQUEST_70B, None, LIMIT_70B)
    model = {"source": "pvc://models/llama.gguf"}
    template = of_template("head", "engine", "RAYLOOM_CACHE")
    assert of_head(model=model, podTemplate=template) == (None, None, None)
    assert of_worker(model=model, podTemplate=template) == (REQUEST_70B, None, LIMIT_70B)


def test_the_volume_of_the_head_holds_the_pod_templates_limit():
    limits = {"ephemeral-storage": "400Gi"}
    template = {"head": {"spec": {"containers": [{"name": "engine", "resources": {"limits": limits}}]}}}

    found = of_head(model={"source": "pvc://models/llama.gguf"}, podTemplate=template)

    assert found == ("142324Mi", "400Gi", "409600Mi")


@pytest.mark.parametrize("source", ["pvc://models/llama.gguf", "file:///models/llama.gguf"])
def test_each_pod_has_room_for_a_gguf_file_that_it_converts(source):
    assert of_worker(model={"source": source}) == (REQUEST_70B, None, LIMIT_70B)
    assert of_head(model={"source": source}) == (REQUEST_70B, None, LIMIT_70B)


def test_the_manifests_request_wins_and_the_volume_holds_the_larger():
    def given(**resources):
        kinds = {kind: {"ephemeral-storage": quantity} for kind, quantity in resources.items()}
        return of_worker(engine={"resources": kinds})

    assert given(requests="300Gi") == ("300Gi", None, "307200Mi")
    assert given(requests="10Gi") == ("10Gi", None, LIMIT_70B)
    # Kubernetes uses the limit as the request.
    assert given(limits="200Gi") == (None, "200Gi", LIMIT_70B)
    assert given(requests="10Gi", limits="400Gi") == ("10Gi", "400Gi", "409600Mi")


def test_a_built_in_model_and_an_uninspected_one_keep_their_requests():
    assert disk(ray_cluster(make_resolved(), "00000000")["spec"]["workerGroupSpecs"][0]["template"]["spec"],
                "ray-worker", "scratch") == (None, None, None)  # fmt: skip
    assert resolve(make_service(model=HUB), "i").checkpoint_bytes is None
    assert scratch_volume("scratch", 0, {}) == {"name": "scratch", "emptyDir": {}}


def test_the_revision_does_not_depend_on_it():
    service = make_service(model=HUB | {"revision": "main"})
    small = LLAMA31_8B.model_copy(update={"num_parameters": 1})

    assert revision(resolve(service, "i", LLAMA31_8B)) == revision(resolve(service, "i", small))
    assert revision(resolve(service, "i", LLAMA31_8B)) == revision(resolve(service, "i"))
    assert builtin_facts(service.spec.model) is None


@pytest.mark.parametrize(
    ("cause", "cure"),
    [
        ("0/3 nodes are available: 3 Insufficient ephemeral-storage.", "give spec.model.cache a place"),
        ("0/3 nodes are available: 3 Insufficient memory.", "Add nodes, or lower spec.engine.resources."),
    ],
)
def test_the_message_for_a_pod_without_room_names_the_cure(cause, cure):
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": cause}
    fault = make_pod("w", is_head=False, node="", conditions=[unplaced]).fault

    assert fault.reason is Reason.UNSCHEDULABLE
    assert cause in fault.message and cure in fault.message
