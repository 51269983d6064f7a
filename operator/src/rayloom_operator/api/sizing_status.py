"""`status.sizing`: the chosen parallelism and its alternatives, in the form that the API server stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from rayloom_operator.api.base import Message, StatusPart


class SizedShape(StatusPart):
    """A choice of parallelism for a model, with the memory and the context length that follow from it."""

    tensor: int = Field(ge=1, le=1024, description="Ranks that share each layer.")
    pipeline: int = Field(ge=1, le=1024, description="Stages that share the layers.")
    pods: int = Field(ge=1, le=1024, description="Worker pods, each with pipeline / pods stages.")
    nodes: int = Field(description="Least number of nodes for these pods; on CPU one for each pod.")
    weights_bytes_per_rank: int = Field(description="Bytes of the largest rank's weights.")
    adapters_bytes_per_rank: int | None = Field(
        None,
        ge=0,
        description="Bytes for LoRA adapters on the rank that needs most: engine.args.maxLoras adapters of LoRA rank "
        "maxLoraRank, and the buffers of a step. Absent without model.adapters, and if status.model.costs has no "
        "adapters.",
    )
    draft_weights_bytes: int | None = Field(
        None,
        ge=0,
        description="Bytes of the draft model's weights, all on the rank that samples. The draft model's KV is counted "
        "in kvTokens. Absent without model.draft.",
    )
    kv_tokens: int = Field(
        0,
        description="Tokens for which the KV cache has room. If the memory of a rank is unknown: tokens that the "
        "largest number of sequences can have.",
    )
    max_model_len: int = Field(0, description="Longest prompt + output in tokens.")
    concurrent_requests: int = Field(0, description="Requests of maxModelLen tokens that have room at once.")

    @property
    def shape(self) -> str:
        return f"TP{self.tensor}xPP{self.pipeline}"

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline


class Candidate(SizedShape):
    fits: bool = Field(description="True if the model fits.")
    why_not: Message = Field("", description="Reason why the model does not fit; empty when it does.")


class SizingStatus(SizedShape):
    advice: Message = Field("", description="A better use of the accelerators; empty when there is none.")
    accelerator_memory: int | None = Field(
        None,
        ge=1,
        le=1 << 60,
        description="Bytes of one accelerator according to the nodes' labels; absent where the spec gives "
        "accelerator.memory.",
    )
    accelerator_nodes: str | None = Field(
        None,
        description="The nodes whose labels were read, as accelerator.resource and scheduling.nodeSelector selected "
        "them.",
    )
    inputs: str = Field(
        description="Hash of the inputs of the sizing. While the hash stays the same, so does the choice."
    )
    alternatives: tuple[Candidate, ...] = Field((), max_length=8, description="Other candidates, the cheapest first.")


def stored_sizing(status: Mapping[str, Any]) -> SizingStatus | None:
    """Returns the sizing in a status document; None if it is missing, or has values that no operator writes."""
    try:
        found = SizingStatus.model_validate(status["sizing"], strict=False)
    except (KeyError, ValidationError):
        return None
    return found if found.pipeline % found.pods == 0 else None
