"""The fields of the spec that decide the size of an engine: its accelerators, and how many ranks share the model."""

from __future__ import annotations

from pydantic import Field

from rayloom_operator.api.base import Part, Quantity


class Parallelism(Part):
    tensor: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Ranks that share each layer; they run in the same pod. The number of the model's attention heads "
        "must be a multiple of this number. Default: computed from the model and `accelerator`; 1 on CPU.",
    )
    pipeline: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Stages: consecutive parts of the layers, each computed by other ranks. With `accelerator`, as "
        "many stages as fit on a node share a pod. On CPU, each stage has a pod of its own. Default: computed from the "
        "model and `accelerator`; 1 on CPU.",
    )


class Accelerator(Part):
    resource: str = Field(
        "nvidia.com/gpu",
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        max_length=253,
        description="Extended resource that pods request, such as nvidia.com/gpu. It must be a CUDA device.",
    )
    per_node: int = Field(
        1,
        ge=1,
        le=64,
        description="Accelerators of one node. The ranks of one stage share a node; different stages may be on "
        "different nodes.",
    )
    memory: Quantity | None = Field(
        None,
        description="Memory of one accelerator as its driver shows it, such as 80Gi or 81559Mi: a text with a unit. "
        "Default: the smallest memory in the labels (such as nvidia.com/gpu.memory) of the nodes that have the "
        "resource and can run the pods.",
    )


class Sizing(Part):
    min_concurrent_requests: int = Field(
        1,
        ge=1,
        le=4096,
        description="Requests of maxModelLen tokens for which the KV cache must have room at once. If there is less "
        "room, the model does not fit.",
    )
