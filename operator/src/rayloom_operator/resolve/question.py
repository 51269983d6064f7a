"""Question: the inputs of a sizing, and their hash, which the status stores. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields

from rayloom_operator.api.costs import Costs
from rayloom_operator.api.model_facts import ModelShape
from rayloom_operator.resolve.rank_memory import BLOCK_SIZE, AdapterRoom, DraftRoom

# Copies of the engine's defaults. A contract test compares them with the engine's.
MAX_NUM_SEQS = 64
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 8192
MAX_LORAS = 8
MAX_LORA_RANK = 16
MAX_DRAFTED = 7
DENSE = "dense"  # for `Question.quantization`: the spec gives no value, and the engine makes all weights dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All inputs of a sizing."""

    shape: ModelShape  # the model's shape
    dtype: str  # type of the numbers in weights and KV cache
    per_node: int | None  # accelerators per node; None on CPU
    memory: int | None  # bytes of an accelerator; on CPU, bytes of a pod; None if unknown
    tensor: int | None  # tensor parallel size; None: to be computed
    pipeline: int | None
    max_model_len: int | None  # None: the model's limit, or less if the limit does not fit
    num_requests: int  # requests of max_model_len tokens that must fit into the KV cache at once
    # The costs are None if an engine of an earlier version inspected the model. The costs are not part of the hash.
    # Another version of the engine may compute other costs for the same model, and that must not change running
    # services.
    costs: Costs | None = None
    # Settings of the engine. None stands for the default, so an engine with another default does not change the hash.
    max_num_seqs: int | None = None
    num_step_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_kv_blocks: int | None = None
    kv_host_memory_bytes: int | None = None  # on CPU, where it takes memory that KV blocks could take; else None
    # With "none", "int8" or DENSE, memory is computed as if all weights were dense. The hash depends only on whether
    # the value is "none".
    quantization: str | None = None
    # True if ranks keep memory for LoRA adapters and the costs give the size of that memory, else None. If
    # `keeps_adapters` is None, the next two fields are None, too. Fields that are None are not part of the hash. So the
    # hash stays the same for services without adapters, and for models whose facts are of an earlier version.
    keeps_adapters: bool | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    # None without a draft model. The next four fields are None, too, if `draft` is None. The hash covers these four
    # fields in place of `draft`, which is computed from the draft model's costs.
    draft: DraftRoom | None = None
    draft_source: str | None = None
    draft_commit: str | None = None  # or the revision in the spec, if the draft model has no commit
    draft_quantization: str | None = None  # None stands for "auto", too; each other value gives other bytes
    num_drafted: int | None = None

    def num_blocks_of(self, num_tokens: int) -> int:
        """Returns the largest number of KV blocks that a sequence of `num_tokens` holds at once.

        With sliding windows a sequence holds fewer blocks than its tokens fill, because the engine frees blocks that no
        later token sees. The first token of a step sees the span - 1 positions before it. These positions may begin
        inside a block, so one more block is counted.
        """
        total = -(-num_tokens // BLOCK_SIZE)
        span = self.parts.attention_span
        if span is None:
            return total
        return min(total, -(-(span - 1 + self.most_step_tokens) // BLOCK_SIZE) + 1)

    @property
    def parts(self) -> Costs:
        """The model's costs; must not be None."""
        assert self.costs is not None, "nothing is sized without costs"
        return self.costs

    @property
    def is_cpu(self) -> bool:
        return self.per_node is None

    @property
    def keeps_quantised(self) -> bool:
        """True if ranks keep the checkpoint's quantised weights. With accelerators weights are dense."""
        return self.is_cpu and self.quantization in (None, "auto")

    @property
    def most_seqs(self) -> int:
        return self.max_num_seqs or MAX_NUM_SEQS

    @property
    def most_rows(self) -> int:
        """The largest number of rows of logits in a step: one for each sequence, or the rows of one draft."""
        return self.most_seqs if self.draft is None else max(self.most_seqs, 1 + self.draft.num_drafted)

    @property
    def most_step_tokens(self) -> int:
        return self.num_step_tokens or (CPU_STEP_TOKENS if self.is_cpu else GPU_STEP_TOKENS)

    @property
    def adapters(self) -> AdapterRoom | None:
        """The adapters for which ranks keep memory; None if they keep none, or if the costs do not say how much."""
        costs = self.parts.adapters
        if not self.keeps_adapters or costs is None:
            return None
        return AdapterRoom(
            costs=costs,
            num_adapters=self.max_loras or MAX_LORAS,
            lora_rank=self.max_lora_rank or MAX_LORA_RANK,
            num_step_tokens=self.most_step_tokens,
        )

    @property
    def engine_cuts_length(self) -> bool:
        """True if the engine itself chooses the context length: on CPU only the engine can measure the free memory."""
        return self.is_cpu and self.max_model_len is None and self.num_requests == 1

    @property
    def inputs(self) -> str:
        """The hash of the inputs: 8 hex digits, the same in every version of the operator."""
        shape = self.shape.model_dump(exclude_defaults=True)
        # `asdict` would copy deeply, which is slow, and each reconcile computes this hash.
        document = {each.name: getattr(self, each.name) for each in fields(self)} | {"shape": shape, "costs": None}
        document["draft"] = None
        document["quantization"] = "none" if self.quantization == "none" else None
        given = {name: value for name, value in document.items() if value is not None}
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:8]
