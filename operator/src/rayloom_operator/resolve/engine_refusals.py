"""Specs with which no engine can serve, found in the spec and in the facts of its model. Pure.

Contradictions inside a spec are refused in `api`. The checks here need the model's facts, are for clusters only, or
read the values of variables: their length has no limit, so a rule of the API server would be too expensive.
"""

from __future__ import annotations

from rayloom_operator.api.int8 import OF_DRAFT, OF_MODEL
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.pod_template.template import WorkerTemplate
from rayloom_operator.api.spec import LLMService
from rayloom_operator.errors import SpecError

# NVIDIA's container toolkit gives a container GPUs if it has this variable, even if the pod requests none.
_GPU_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
_KERNELS_VARIABLE = "RAYLOOM_KERNELS"


def model_problems(service: LLMService, facts: ModelFacts) -> tuple[str, ...]:
    """Returns a message for each field of the spec that the engine refuses for a model with these facts."""
    return (*_float16_problems(service, facts), *_adapter_problems(service, facts))


def _float16_problems(service: LLMService, facts: ModelFacts) -> tuple[str, ...]:
    """Returns a message for each model that is to have int8 weights, and whose checkpoint is in float16.

    Only for `dtype: auto`: with another dtype, the checkpoint's does not count.
    """
    model = service.spec.model
    if model.dtype != "auto":
        return ()
    found = []
    if service.spec.engine.args.quantization == "int8" and facts.shape.checkpoint_dtype == "float16":
        found.append(_float16_in_words(OF_MODEL, model.source))
    draft = model.draft
    is_int8 = draft is not None and draft.quantization == "int8"
    if draft is not None and is_int8 and facts.draft is not None and facts.draft.checkpoint_dtype == "float16":
        found.append(_float16_in_words(OF_DRAFT, draft.source))
    return tuple(found)


def _adapter_problems(service: LLMService, facts: ModelFacts) -> tuple[str, ...]:
    """Returns a message if the service may have LoRA adapters, and the code of its model cannot have them.

    An empty list counts: then adapters can be loaded while the engine runs.
    """
    if service.spec.model.adapters is None:
        return ()
    shape = facts.shape
    if shape.model_backend == "transformers":
        backend = service.spec.engine.args.model_backend
        change = ", or spec.engine.args.modelBackend" if backend == "transformers" else ""
        return (
            "spec.model.adapters: LoRA adapters need the engine's own decoder, and transformers' modules compute "
            f"{shape.architecture}: remove spec.model.adapters{change}",
        )
    if shape.num_experts is not None:
        return (
            f"spec.model.adapters: {shape.architecture} has experts, and LoRA adapters cannot update such a model: "
            "remove spec.model.adapters, or merge an adapter into the model",
        )
    return ()


def check_kernels(service: LLMService) -> None:
    """Raises SpecError if weights are to be int8, and the variable RAYLOOM_KERNELS excludes the CPU library.

    Only this library computes int8 weights.
    """
    spec = service.spec
    draft = spec.model.draft
    fields = ((OF_MODEL, spec.engine.args.quantization), (OF_DRAFT, None if draft is None else draft.quantization))
    int8 = [f"spec.{field}" for field, given in fields if given == "int8"]
    value = next((each.value for each in spec.engine.env if each.name == _KERNELS_VARIABLE), None)
    if int8 and value not in (None, "", "auto"):
        raise SpecError(
            (
                f"spec.engine.env: {_KERNELS_VARIABLE} is {value}, and {int8[0]} int8 needs the kernels that auto "
                f"chooses on a CPU: remove the variable, or {int8[0]}",
            )
        )


def check_gpus(service: LLMService) -> None:
    """Raises SpecError if ranks are to compute on GPUs, and nothing in the spec can give their pods a GPU.

    Such an engine would wait an hour for GPUs in its Ray cluster, and then fail. Pods can have GPUs without
    `accelerator`: by other resources, by an image or a variable for NVIDIA's container toolkit, or by a template.
    """
    spec = service.spec
    if spec.engine.args.device != "cuda" or spec.accelerator is not None:
        return
    resources = spec.engine.resources
    may_have_gpus = (
        spec.engine.image is not None
        or any("/" in name for name in (*resources.requests, *resources.limits))  # such as nvidia.com/gpu
        or any(variable.name == _GPU_VARIABLE for variable in spec.engine.env)
        or spec.pod_template.worker != WorkerTemplate()
    )
    if not may_have_gpus:
        raise SpecError(
            (
                "spec.engine.args.device: cuda computes on GPUs, and the pods of this service request none: add "
                "spec.accelerator, or remove spec.engine.args.device",
            )
        )


def _float16_in_words(field: str, source: str) -> str:
    return (
        f"spec.{field}: int8 works with bfloat16 or float32, and the checkpoint of {source} is in float16: set "
        f"spec.model.dtype to bfloat16 or float32, or remove spec.{field}"
    )
