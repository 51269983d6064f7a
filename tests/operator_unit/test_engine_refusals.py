"""Specs that no engine could serve, refused before any engine starts: int8 weights, folders of models, mounts, GPUs.

Mistakes in a draft model are in test_draft_refusals.py. The engine's own rules for int8 are compared with these in
tests/contract/test_engine_config.py.
"""

import re

import pytest
import yaml

from rayloom_operator.__main__ import main
from rayloom_operator.errors import SpecError
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.engine_refusals import check_gpus, check_kernels
from rayloom_operator.resolve.resolved import Hub, resolve
from rt_operator import make_service
from rt_shapes import SMOLLM2
from rt_world import service, with_world

SOURCE = "builtin://smollm2-135m"
OWN = {"source": SOURCE, "draft": {"source": SOURCE}}
INT8 = {"engine": {"args": {"quantization": "int8"}}}
ON_CUDA = {"engine": {"args": {"device": "cuda"}}}
NO_GPU = (
    "spec.engine.args.device: cuda computes on GPUs, and the pods of this service request none: add spec.accelerator, "
    "or remove spec.engine.args.device"
)


def args(**given):
    return {"engine": {"args": given}}


def refusal(model=None, **spec):
    with pytest.raises(SpecError) as refused:
        make_service(model=model or {"source": SOURCE}, **spec)
    (problem,) = refused.value.problems
    return problem


def facts_of(**shape):
    return SMOLLM2.model_copy(update={"shape": SMOLLM2.shape.model_copy(update=shape)})


def in_float16(draft=False):
    facts = facts_of(checkpoint_dtype="float16")
    return SMOLLM2.model_copy(update={"draft": facts.as_draft()}) if draft else facts


def test_an_int8_model_on_a_gpu_or_in_float16_is_refused_as_an_int8_draft_model_is():
    on_cpu = "works on CPU only: remove it, or remove accelerator and engine.args.device cuda, as far as they are set"
    types = "works with model.dtype auto, bfloat16 or float32, and model.dtype is float16: change one of the two"
    draft = {**OWN, "draft": {"source": SOURCE, "quantization": "int8"}}

    assert refusal(**args(quantization="int8", device="cuda")) == f"spec: engine.args.quantization int8 {on_cpu}"
    assert refusal(accelerator={}, **INT8) == f"spec: engine.args.quantization int8 {on_cpu}"
    assert refusal({"source": SOURCE, "dtype": "float16"}, **INT8) == f"spec: engine.args.quantization int8 {types}"
    assert refusal({**draft, "dtype": "float16"}) == f"spec: model.draft.quantization int8 {types}"
    both = refusal({**draft, "dtype": "float16"}, **INT8)
    assert both == f"spec: engine.args.quantization int8 {types}; model.draft.quantization int8 {types}"


def test_an_int8_model_on_the_modules_of_transformers_is_refused():
    assert refusal(**args(quantization="int8", modelBackend="transformers")) == (
        "spec.engine.args: quantization int8 needs the engine's own decoder, and modelBackend is transformers: remove "
        "one of the two"
    )
    make_service(**args(quantization="int8", modelBackend="native"))
    make_service(**args(quantization="none", modelBackend="transformers"))


def test_int8_weights_of_a_checkpoint_in_float16_are_refused_once_the_facts_are_known():
    words = (
        f"int8 works with bfloat16 or float32, and the checkpoint of {SOURCE} is in float16: set spec.model.dtype to "
        "bfloat16 or float32, or remove spec."
    )
    with pytest.raises(SpecError) as refused:
        resolve(make_service(**INT8), "i", in_float16())
    assert refused.value.problems == (f"spec.engine.args.quantization: {words}engine.args.quantization",)
    drafted = {**OWN, "draft": {"source": SOURCE, "quantization": "int8"}}
    with pytest.raises(SpecError) as refused:
        resolve(make_service(model=drafted), "i", in_float16(draft=True))
    assert refused.value.problems == (f"spec.model.draft.quantization: {words}model.draft.quantization",)


def test_a_checkpoint_in_float16_is_served_in_another_type_or_without_int8():
    resolve(make_service(model={"source": SOURCE, "dtype": "bfloat16"}, **INT8), "i", in_float16())
    resolve(make_service(), "i", in_float16())
    resolve(make_service(**INT8), "i", SMOLLM2)


ADAPTED = {"source": SOURCE, "adapters": [{"name": "a", "source": "hf://org/a"}]}
BY_TRANSFORMERS = (
    "spec.model.adapters: LoRA adapters need the engine's own decoder, and transformers' modules compute "
    "LlamaForCausalLM: remove spec.model.adapters"
)
WITH_EXPERTS = (
    "spec.model.adapters: LlamaForCausalLM has experts, and LoRA adapters cannot update such a model: remove "
    "spec.model.adapters, or merge an adapter into the model"
)


@pytest.mark.parametrize(
    ("shape", "spec", "sentence"),
    [
        ({"model_backend": "transformers"}, {}, BY_TRANSFORMERS),
        (
            {"model_backend": "transformers"},
            args(modelBackend="transformers"),
            f"{BY_TRANSFORMERS}, or spec.engine.args.modelBackend",
        ),
        ({"num_experts": 8}, {}, WITH_EXPERTS),
    ],
)
def test_adapters_of_a_model_that_cannot_have_them_are_refused_once_the_facts_are_known(shape, spec, sentence):
    for adapters in (ADAPTED["adapters"], []):
        with pytest.raises(SpecError) as refused:
            resolve(make_service(model={**ADAPTED, "adapters": adapters}, **spec), "i", facts_of(**shape))
        assert refused.value.problems == (sentence,)
    resolve(make_service(**spec), "i", facts_of(**shape))
    resolve(make_service(model=ADAPTED), "i", SMOLLM2)


def with_kernels(value):
    return [{"name": "RAYLOOM_KERNELS", "value": value}]


@pytest.mark.parametrize("value", ["plain", "reference", "triton"])
def test_int8_weights_without_the_kernels_that_compute_them_are_refused(value):
    def sentence(field):
        return (
            f"spec.engine.env: RAYLOOM_KERNELS is {value}, and {field} int8 needs the kernels that auto chooses on a "
            f"CPU: remove the variable, or {field}"
        )

    own = {"engine": {"args": {"quantization": "int8"}, "env": with_kernels(value)}}
    with pytest.raises(SpecError) as refused:
        check_kernels(make_service(**own))
    assert refused.value.problems == (sentence("spec.engine.args.quantization"),)
    drafted = {**OWN, "draft": {"source": SOURCE, "quantization": "int8"}}
    with pytest.raises(SpecError) as refused:
        check_kernels(make_service(model=drafted, engine={"env": with_kernels(value)}))
    assert refused.value.problems == (sentence("spec.model.draft.quantization"),)


@pytest.mark.parametrize(
    "engine",
    [
        {"args": {"quantization": "int8"}},
        {"args": {"quantization": "int8"}, "env": with_kernels("auto")},
        {"args": {"quantization": "int8"}, "env": with_kernels("")},
        {"args": {"quantization": "int8"}, "env": [{"name": "OTHER", "value": "plain"}]},
        {"args": {"quantization": "none"}, "env": with_kernels("plain")},
        {"env": with_kernels("plain")},
    ],
)
def test_other_weights_and_other_variables_are_accepted(engine):
    check_kernels(make_service(engine=engine))


def test_a_service_whose_kernels_exclude_its_weights_gets_a_condition_and_no_pod():
    async def story(world):
        world.ask_for(service(engine={"args": {"quantization": "int8"}, "env": with_kernels("plain")}))
        await world.until(lambda: world.reason("Accepted") == "InvalidSpec")
        await world.rest()
        assert world.message().startswith("spec.engine.env: RAYLOOM_KERNELS is plain, and ")
        assert world.kube.named("RayCluster") == []

    with_world(story)


@pytest.mark.parametrize(
    "path",
    (
        *("/tmp", "/tmp/", "//tmp", "/./tmp", "/tmp/.", "/tmp/ray", "/usr", "/opt", "/etc", "/var/run", "/dev/shm"),
        *("//", "/.", "/etc/rayloom/m", "/etc/rayloom-keys", "/proc/1/m", "/sys"),
    ),
)
def test_a_model_at_a_folder_that_pods_need_is_refused(path):
    assert refusal({"source": f"file://{path}"}).startswith(
        f"spec.model.source: 'file://{path}' is not allowed: pods mount the model at its own path, where it must not "
        "hide a folder of their own or of the engine's image: the path must not be /bin, /dev, /dev/shm, "
    )


@pytest.mark.parametrize(
    "source",
    [
        *("file:///data/../etc", "file:///..", "file:///data/m/..", "file:///data//../m"),
        *("pvc://claim/../etc", "pvc://claim/..", "pvc://claim/m/../../etc", "pvc://claim/m/../"),
    ],
)
def test_a_model_behind_two_dots_is_refused(source):
    assert refusal({"source": source}) == (
        f"spec.model.source: '{source}' is not allowed: the path must not have a part '..'; write it without it"
    )


@pytest.mark.parametrize("path", ["a..b", "..m", "m..", "...", "./m"])
def test_a_part_of_a_claims_path_may_have_dots(path):
    assert make_service(model={"source": f"pvc://claim/{path}"}).spec.model.claim_path == path


@pytest.mark.parametrize(
    "path",
    (
        *("/models", "/models/", "/models/x.gguf", "/tmp/m", "/tmp/ray-models", "/tmpfs", "/opt/models", "/var/lib/m"),
        *("/usr/share/models/m", "/etc/models", "/etc/rayloom-models", "/run/media/m", "/opt/rayloom/m", "/cache"),
        *("/a..b/.m", "/data//m", "/data/./m", "/procs", "/adapters/m"),
    ),
)
def test_a_model_at_a_folder_where_it_can_be_served_is_accepted(path):
    assert make_service(model={"source": f"file://{path}"}).spec.model.host_path == path.rstrip("/")


def test_no_model_can_be_where_an_engines_pods_always_mount_a_folder():
    full = make_service(auth={"apiKeySecretRef": {"name": "keys", "key": "keys"}}, gateway={})
    cluster = ray_cluster(resolve(full, "i", SMOLLM2, hub=Hub(ca_config_map="ca")), "chat-1")
    templates = (
        cluster["spec"]["headGroupSpec"]["template"],
        *(group["template"] for group in cluster["spec"]["workerGroupSpecs"]),
    )
    containers = [each for template in templates for each in template["spec"]["containers"]]
    paths = {mount["mountPath"] for each in containers for mount in each["volumeMounts"]}

    assert {"/tmp", "/tmp/ray", "/dev/shm", "/etc/rayloom", "/etc/rayloom-keys"} <= paths
    for path in paths:
        assert "is not allowed: pods mount the model at its own path" in refusal({"source": f"file://{path}"})


def test_a_model_at_the_folder_of_the_cache_is_refused_only_beside_a_cache():
    cached = {"draft": {"source": "hf://org/draft"}, "cache": {"persistentVolumeClaim": "hub"}}
    assert refusal({"source": "file:///cache/", **cached}) == (
        "spec.model: source: file:///cache/: model.cache is mounted at /cache, so model.source cannot be "
        "file:///cache: move the model to another folder of the nodes, for example to /data/models"
    )
    make_service(model={"source": "file:///cache/m", **cached})


def mounted(path, model, pod="worker", container="ray-worker"):
    mounts = [{"name": "v", "mountPath": path}]
    spec = {"volumes": [{"name": "v", "emptyDir": {}}], "containers": [{"name": container, "volumeMounts": mounts}]}
    return {"model": model, "podTemplate": {pod: {"spec": spec}}}


DRAFT_CLAIM = {"source": SOURCE, "draft": {"source": "pvc://drafts/d"}}
ADAPTER_CLAIM = {"source": SOURCE, "adapters": [{"name": "a", "source": "pvc://loras/a"}]}


@pytest.mark.parametrize(
    ("path", "model", "folder"),
    [
        ("/draft-model/d/x", DRAFT_CLAIM, "/draft-model"),
        ("/draft-model/other", DRAFT_CLAIM, "/draft-model"),
        ("/adapters/loras/a/x", ADAPTER_CLAIM, "/adapters/loras"),
        ("/adapters/loras/b", ADAPTER_CLAIM, "/adapters/loras"),
    ],
)
def test_a_mount_inside_the_claim_of_a_draft_model_or_of_adapters_is_refused(path, model, folder):
    sentence = f"is in {folder}, where pods mount a claim of the draft model or of adapters read-only; use another one"
    for pod, container in (("worker", "ray-worker"), ("head", "engine")):
        said = refusal(**mounted(path, model, pod, container))
        assert said == f"spec: {path}: this mountPath of container {container} {sentence}"


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/draft-models", DRAFT_CLAIM),
        ("/draft-model/d", OWN),
        ("/draft-model/d", {"source": "pvc://drafts/m", "draft": {"source": "pvc://drafts/d"}}),
        ("/adapters/other", ADAPTER_CLAIM),
        ("/adapters/loras", {"source": "builtin://smollm2-135m"}),
        # A file over one of the model's files, such as its chat template, whose folder is in the claim.
        ("/models/m/chat_template.jinja", {"source": "pvc://models/m"}),
    ],
)
def test_a_mount_beside_the_claims_or_over_a_file_of_the_model_is_accepted(path, model):
    make_service(**mounted(path, model))


@pytest.mark.parametrize("path", ["/draft-model", "/draft-model/d"])
def test_a_mount_over_the_claim_of_a_draft_model_hides_it(path):
    assert refusal(**mounted(path, DRAFT_CLAIM)) == (
        f"spec: {path}: this mountPath of container ray-worker hides the model, its draft model or its adapters; use "
        "another one"
    )


def test_the_device_cuda_without_anything_that_gives_pods_a_gpu_is_refused():
    with pytest.raises(SpecError, match=f"^{re.escape(NO_GPU)}$"):
        check_gpus(make_service(**ON_CUDA))


@pytest.mark.parametrize(
    "spec",
    [
        args(),
        args(device="auto"),
        args(device="cpu"),
        {"accelerator": {}, **ON_CUDA},
        {"engine": {**ON_CUDA["engine"], "image": "mine"}},
        {"engine": {**ON_CUDA["engine"], "resources": {"limits": {"nvidia.com/gpu": "1"}}}},
        {"engine": {**ON_CUDA["engine"], "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}},
        {**ON_CUDA, "podTemplate": {"worker": {"spec": {"runtimeClassName": "nvidia"}}}},
    ],
)
def test_the_device_cuda_is_accepted_if_pods_may_have_a_gpu(spec):
    check_gpus(make_service(**spec))


def test_a_new_service_without_gpus_gets_a_condition_and_no_pod():
    async def story(world):
        world.ask_for(service(**ON_CUDA))
        await world.until(lambda: world.reason("Accepted") == "InvalidSpec")
        await world.rest()
        assert world.message() == NO_GPU
        assert world.kube.named("RayCluster") == []

    with_world(story)


def test_a_service_that_has_served_without_visible_gpus_stays_accepted():
    async def story(world):
        served = {"currentRevision": "00000000", "updateRevision": "00000000", "currentRevisionServed": True}
        world.ask_for(service(**ON_CUDA) | {"status": {"rollout": served}})
        await world.until(lambda: world.reason("Accepted") == "Valid")

    with_world(story)


def test_plan_refuses_the_device_cuda_without_gpus_in_a_manifest_and_in_its_successor(tmp_path, capsys):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    for path, spec in ((old, {}), (new, ON_CUDA)):
        document = {key: part for key, part in service(**spec).items() if key != "metadata"}
        path.write_text(yaml.safe_dump(document | {"metadata": {"name": "chat"}}), encoding="utf-8")

    for arguments in (["-f", str(new)], ["--rollout", str(old), str(new)]):
        assert main(["plan", *arguments]) == 2
        assert NO_GPU in capsys.readouterr().err
    assert main(["plan", "-f", str(old)]) == 0
