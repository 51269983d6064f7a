"""Resolved: a service's spec, completed with every value from which the engines are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from rayloom_operator.api.accelerator_memory import WITHOUT_CLUSTER, NodeMemory, node_set_key
from rayloom_operator.api.base import amount
from rayloom_operator.api.draft_facts import DraftFacts
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.sizing import Accelerator
from rayloom_operator.api.sizing_status import SizingStatus, stored_sizing
from rayloom_operator.api.spec import LLMService
from rayloom_operator.errors import MemoryUnknown, SpecError
from rayloom_operator.resolve.draft_inputs import draft_inputs, weights_form
from rayloom_operator.resolve.engine_refusals import model_problems
from rayloom_operator.resolve.question import Question
from rayloom_operator.resolve.sizing import places, size

_NO_DRAFT = (
    "spec.model.draft: the facts of the model do not have those of the draft model; they come from `rayloom-engine "
    "inspect --draft-model`"
)
_NO_COSTS = (
    "spec.engine.image: the engine of this image is of an earlier version, whose inspection gives no costs of the "
    "model, so the parallelism cannot be computed; use an image of the operator's version, or give "
    "spec.parallelism.tensor and spec.parallelism.pipeline"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Settings with which pods reach the models' hub. A running engine keeps the settings with which it was created."""

    endpoint: str = ""  # URL of a mirror; empty for huggingface.co
    allows_own: bool = False  # HF_ENDPOINT in a manifest may name another hub, although that hub gets the pods' token
    # ConfigMap with CA certificates, in each service's namespace; empty: pods use the image's certificates
    ca_config_map: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The spec, with a value for each of image, parallelism and commit. Equal objects give equal engines."""

    service: LLMService
    image: str
    tensor: int
    pipeline: int
    stages_per_pod: int = 1  # divides `pipeline`
    commit: str = ""  # commit of a hub's model; empty for other sources
    max_model_len: int | None = None  # tokens; None: the engine chooses
    checkpoint_bytes: int | None = None  # bytes of the stored weights; None while the model is not inspected
    draft: DraftFacts | None = None  # None without a draft model, and while it is not inspected
    sizing: SizingStatus | None = None  # how the parallelism was chosen; None if it was not computed
    hub: Hub = Hub()
    has_tls: bool = False  # the engine's port for gateways has a certificate
    # (name, commit) of LoRA adapters of the hub; adapters whose commit is not known yet are missing
    adapter_commits: tuple[tuple[str, str], ...] = ()

    @property
    def shape(self) -> str:
        """The parallelism in the form that the status shows: TP1xPP2."""
        return f"TP{self.tensor}xPP{self.pipeline}"

    @property
    def num_pods(self) -> int:
        """The number of worker pods of one engine."""
        return self.pipeline // self.stages_per_pod

    @property
    def ranks_per_pod(self) -> int:
        return self.tensor * self.stages_per_pod


# Returns the memory of an accelerator on the nodes with the given labels.
MemoryOf = Callable[[Accelerator, Mapping[str, str]], NodeMemory]


def resolve(
    service: LLMService,
    image: str,
    facts: ModelFacts | None = None,
    previous: Mapping[str, Any] = MappingProxyType({}),
    hub: Hub = Hub(),
    memory_of: MemoryOf = lambda accelerator, node_selector: WITHOUT_CLUSTER,
) -> Resolved:
    """Returns the service with image, parallelism, commit and context length decided.

    `image`: the image of the engine's pods. `facts`: None until the model is inspected. Without facts, only a service
    on CPU can be resolved. Facts without costs also suffice if the spec gives both numbers of ranks.

    `previous`: the last written status. If this status has a sizing with the same inputs, that sizing stays, even if
    this version of the operator would choose differently.

    `memory_of` is called only if the spec leaves out the accelerator's memory, and only for a new choice. So a node
    that joins later changes no running service.

    Raises SpecError, DoesNotFit or MemoryUnknown, whose messages name what to change.
    """
    spec = service.spec
    length = spec.model.max_model_len
    if facts is None:
        if spec.accelerator is not None:
            raise SpecError(("spec.accelerator: the parallelism is computed once the model was inspected",))
        return _as_given(service, image, hub)
    draft = None if spec.model.draft is None else facts.draft
    if spec.model.draft is not None and draft is None:
        raise SpecError((_NO_DRAFT,))
    if problems := model_problems(service, facts):
        raise SpecError(problems)
    sizing, asking = _stored_choice(service, facts, previous)
    if sizing is None or sizing.inputs != asking.inputs:
        if facts.costs is None:
            if not is_given(service):
                raise SpecError((_NO_COSTS,))
            # Without costs, the numbers of ranks cannot be checked here. The engine refuses to start if it cannot
            # divide the model among these ranks, or if the model does not fit.
            made = _as_given(service, image, hub)
            return replace(made, commit=facts.commit or "", checkpoint_bytes=facts.checkpoint_bytes, draft=draft)
        nodes = _nodes_to_ask(service)
        memory = None if nodes is None else _memory_of_nodes(service, memory_of)
        asking = question(service, facts, memory)
        sizing = size(asking).model_copy(update={"accelerator_memory": memory, "accelerator_nodes": nodes})
    if sizing.max_model_len < facts.shape.max_position_embeddings and not asking.engine_cuts_length:
        length = sizing.max_model_len
    return Resolved(
        service=service,
        image=image,
        tensor=sizing.tensor,
        pipeline=sizing.pipeline,
        stages_per_pod=sizing.pipeline // sizing.pods,
        commit=facts.commit or "",
        max_model_len=length,
        checkpoint_bytes=facts.checkpoint_bytes,
        draft=draft,
        sizing=sizing,
        hub=hub,
    )


def is_sized(service: LLMService, facts: ModelFacts, previous: Mapping[str, Any]) -> bool:
    """Returns whether the stored sizing is still valid, so that `resolve` computes nothing."""
    sizing, asking = _stored_choice(service, facts, previous)
    return sizing is not None and sizing.inputs == asking.inputs


def is_given(service: LLMService) -> bool:
    """Returns True if no number of ranks has to be computed.

    In this case, the spec gives both numbers, or is for CPU. On CPU, each number that the spec leaves out is 1.
    """
    asked = service.spec.parallelism
    return service.spec.accelerator is None or (asked.tensor is not None and asked.pipeline is not None)


def _as_given(service: LLMService, image: str, hub: Hub) -> Resolved:
    """Returns the service with the parallelism of its spec. Each number that the spec leaves out is 1."""
    spec = service.spec
    tensor = spec.parallelism.tensor or 1
    pipeline = spec.parallelism.pipeline or 1
    pods, _ = places(spec.accelerator.per_node if spec.accelerator is not None else None, tensor, pipeline)
    return Resolved(
        service=service,
        image=image,
        tensor=tensor,
        pipeline=pipeline,
        stages_per_pod=pipeline // pods,
        max_model_len=spec.model.max_model_len,
        hub=hub,
    )


def _stored_choice(
    service: LLMService, facts: ModelFacts, previous: Mapping[str, Any]
) -> tuple[SizingStatus | None, Question]:
    """Returns the last written sizing, and the current question with the accelerator memory of that sizing."""
    sizing = stored_sizing(previous)
    is_same = sizing is not None and sizing.accelerator_nodes == _nodes_to_ask(service)
    return sizing, question(service, facts, sizing.accelerator_memory if sizing is not None and is_same else None)


def _nodes_to_ask(service: LLMService) -> str | None:
    """Returns the key of the nodes whose labels give the memory. None on CPU, or if the spec gives the memory."""
    accelerator = service.spec.accelerator
    if accelerator is None or accelerator.memory is not None:
        return None
    return node_set_key(accelerator, service.spec.scheduling.node_selector)


def _memory_of_nodes(service: LLMService, memory_of: MemoryOf) -> int:
    """Returns the bytes of an accelerator, read from the labels of its nodes. Raises MemoryUnknown."""
    accelerator = service.spec.accelerator
    assert accelerator is not None, "only accelerators have nodes with labels"
    found = memory_of(accelerator, service.spec.scheduling.node_selector)
    if found.num_bytes is None:
        raise MemoryUnknown((f"spec.accelerator.memory is left out, and {found.why_not}",))
    return found.num_bytes


def question(service: LLMService, facts: ModelFacts, memory: int | None = None) -> Question:
    """Returns the inputs of a service's sizing. On CPU each number of ranks that the spec leaves out is 1.

    `memory`: bytes of an accelerator, used only if the spec leaves them out.
    """
    spec = service.spec
    accelerator = spec.accelerator
    args = spec.engine.args
    asked = spec.parallelism
    limit = accelerator.memory if accelerator is not None else spec.engine.resources.limits.get("memory")
    if limit is not None:
        memory = amount(limit)
    keeps_adapters = spec.model.adapters is not None and facts.costs is not None and facts.costs.adapters is not None
    return Question(
        shape=facts.shape,
        costs=facts.costs,
        dtype=facts.shape.checkpoint_dtype if spec.model.dtype == "auto" else spec.model.dtype,
        per_node=None if accelerator is None else accelerator.per_node,
        memory=memory,
        tensor=asked.tensor or (1 if accelerator is None else None),
        pipeline=asked.pipeline or (1 if accelerator is None else None),
        max_model_len=spec.model.max_model_len,
        num_requests=spec.sizing.min_concurrent_requests,
        max_num_seqs=args.max_num_seqs,
        quantization=_quantization(service),
        num_step_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        num_kv_blocks=args.num_kv_blocks,
        kv_host_memory_bytes=(args.kv_host_memory_bytes or None) if accelerator is None else None,
        keeps_adapters=True if keeps_adapters else None,
        max_loras=args.max_loras if keeps_adapters else None,
        max_lora_rank=args.max_lora_rank if keeps_adapters else None,
        **draft_inputs(service, facts.draft),
    )


def _quantization(service: LLMService) -> str | None:
    """Returns the setting, or DENSE if the engine makes all weights dense although the spec does not demand it."""
    model = service.spec.model
    return weights_form(model, model.dtype, service.spec.engine.args.quantization)
