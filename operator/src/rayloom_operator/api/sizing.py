"""The fields of the spec that decide the size of an engine: its accelerators, and how many ranks share the model."""

from __future__ import annotations

from pydantic import Field

from rayloom_operator.api.base import Part, Quantity


class Parallelism(Part):
    tensor: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Ranks that share each layer, together in one pod. The model's attention heads must divide by it. "
        "Default: computed from the model and `accelerator`; 1 on CPU.",
    )
    pipeline: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Stages that share the layers, one after another. As many as fit on a node share a pod; on CPU "
        "each has a pod of its own. Default: computed from the model and `accelerator`; 1 on CPU.",
    )


class Accelerator(Part):
    resource: str = Field(
        "nvidia.com/gpu",
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        max_length=253,
        description="Extended resource that pods request, such as nvidia.com/gpu. It must be a CUDA device.",
    )
    per_node: int = Field(
        1, ge=1, le=64, description="Accelerators of one node. The ranks of a stage share a node, stages need not."
    )
    memory: Quantity | None = Field(
        None,
        description="Memory of one accelerator as its driver shows it, such as 80Gi or 81559Mi. Text, with its unit. "
        "Default: the least of the nodes that have one, from their labels, such as nvidia.com/gpu.memory.",
    )


class Sizing(Part):
    min_concurrent_requests: int = Field(
        1,
        ge=1,
        le=4096,
        description="Requests of maxModelLen tokens for which the KV cache must have room at once; otherwise the model "
        "does not fit.",
    )
