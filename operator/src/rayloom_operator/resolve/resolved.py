"""A service with everything decided that its engines are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rayloom_operator.api.accelerator_memory import WITHOUT_CLUSTER, NodeMemory, node_set_key
from rayloom_operator.api.base import amount
from rayloom_operator.api.model_facts import ELEMENT_BYTES, ModelFacts
from rayloom_operator.api.sizing import Accelerator
from rayloom_operator.api.spec import LLMService
from rayloom_operator.api.status import Sizing, stored_sizing
from rayloom_operator.errors import MemoryUnknown, SpecError
from rayloom_operator.resolve.sizing import Question, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """How pods reach the models' hub. Running engines keep what they were made with."""

    endpoint: str = ""  # URL of a mirror; empty for the hub itself
    allows_own: bool = False  # HF_ENDPOINT of a manifest may name another hub, also where a token is sent to it
    ca_config_map: str = ""  # in each service's namespace, with the certificates to trust; empty for the image's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The spec, and what it leaves open: the image, the parallelism, the commit. Equal ones make equal engines."""

    service: LLMService
    image: str
    tensor: int
    pipeline: int
    stages_per_pod: int = 1  # divides `pipeline`
    commit: str = ""  # of a hub's model; empty for other sources
    max_model_len: int | None = None  # tokens; None leaves it to the engine
    checkpoint_bytes: int | None = None  # of the weights as they are stored; None while the model is not known
    sizing: Sizing | None = None  # how the parallelism came about; None while the model is not known
    hub: Hub = Hub()

    @property
    def shape(self) -> str:
        """As the status prints it: TP1xPP2."""
        return f"TP{self.tensor}xPP{self.pipeline}"

    @property
    def num_pods(self) -> int:
        """Worker pods of one engine."""
        return self.pipeline // self.stages_per_pod

    @property
    def ranks_per_pod(self) -> int:
        return self.tensor * self.stages_per_pod


# The memory of an accelerator, on nodes with such labels.
MemoryOf = Callable[[Accelerator, Mapping[str, str]], NodeMemory]


def resolve(
    service: LLMService,
    image: str,
    facts: ModelFacts | None = None,
    previous: Mapping[str, Any] = MappingProxyType({}),
    hub: Hub = Hub(),
    memory_of: MemoryOf = lambda accelerator, node_selector: WITHOUT_CLUSTER,
) -> Resolved:
    """`image` is the resolved image of the engine's pods, `facts` None while the model was not looked at.

    `previous` is the status as it was written last: while what its sizing was computed from is the same, that choice
    stays, whatever this version of the operator would choose. Without facts only a service on CPU can be resolved.
    `memory_of` is asked where the spec leaves out how much memory an accelerator has, and once for a choice: another
    node changes nothing that runs. Raises SpecError, DoesNotFit or MemoryUnknown, with what to change.
    """
    spec = service.spec
    asked, length = spec.parallelism, spec.model.max_model_len
    if facts is None:
        if spec.accelerator is not None:
            raise SpecError(("spec.accelerator: the parallelism is computed once the model was inspected",))
        tensor, pipeline = asked.tensor or 1, asked.pipeline or 1
        return Resolved(service=service, image=image, tensor=tensor, pipeline=pipeline, max_model_len=length, hub=hub)
    sizing, asking = _stored_choice(service, facts, previous)
    if sizing is None or sizing.inputs != asking.inputs:
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
        checkpoint_bytes=facts.num_parameters * ELEMENT_BYTES[facts.shape.checkpoint_dtype],
        sizing=sizing,
        hub=hub,
    )


def is_sized(service: LLMService, facts: ModelFacts, previous: Mapping[str, Any]) -> bool:
    """Whether the choice of before stays, so that `resolve` computes none."""
    sizing, asking = _stored_choice(service, facts, previous)
    return sizing is not None and sizing.inputs == asking.inputs


def _stored_choice(
    service: LLMService, facts: ModelFacts, previous: Mapping[str, Any]
) -> tuple[Sizing | None, Question]:
    """The sizing that was written last, and what would be asked now with the accelerators' memory of then."""
    sizing = stored_sizing(previous)
    is_same = sizing is not None and sizing.accelerator_nodes == _nodes_to_ask(service)
    return sizing, question(service, facts, sizing.accelerator_memory if sizing is not None and is_same else None)


def _nodes_to_ask(service: LLMService) -> str | None:
    """None where the spec says how much memory an accelerator has, or there is no accelerator."""
    accelerator = service.spec.accelerator
    if accelerator is None or accelerator.memory is not None:
        return None
    return node_set_key(accelerator, service.spec.scheduling.node_selector)


def _memory_of_nodes(service: LLMService, memory_of: MemoryOf) -> int:
    """Raises MemoryUnknown."""
    accelerator = service.spec.accelerator
    assert accelerator is not None, "its nodes are asked"
    found = memory_of(accelerator, service.spec.scheduling.node_selector)
    if found.num_bytes is None:
        raise MemoryUnknown((f"spec.accelerator.memory is left out, and {found.why_not}",))
    return found.num_bytes


def question(service: LLMService, facts: ModelFacts, memory: int | None = None) -> Question:
    """What sizing is asked for a service. On CPU nothing is computed that the spec leaves out: it is 1.

    `memory` is that of an accelerator in bytes, where the spec leaves it out.
    """
    spec = service.spec
    accelerator, args, asked = spec.accelerator, spec.engine.args, spec.parallelism
    limit = accelerator.memory if accelerator is not None else spec.engine.resources.limits.get("memory")
    if limit is not None:
        memory = amount(limit)
    return Question(
        shape=facts.shape,
        dtype=facts.shape.checkpoint_dtype if spec.model.dtype == "auto" else spec.model.dtype,
        per_node=None if accelerator is None else accelerator.per_node,
        memory=memory,
        tensor=asked.tensor or (1 if accelerator is None else None),
        pipeline=asked.pipeline or (1 if accelerator is None else None),
        max_model_len=spec.model.max_model_len,
        num_requests=spec.sizing.min_concurrent_requests,
        max_num_seqs=args.max_num_seqs,
        num_step_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        num_kv_blocks=args.num_kv_blocks,
    )
