"""Load: the memory that the ranks need under one choice of parallelism, and whether it fits. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayloom_operator.api.costs import ELEMENT_BYTES
from rayloom_operator.resolve.question import Question
from rayloom_operator.resolve.rank_memory import (
    BLOCK_SIZE,
    GIB,
    Cut,
    RankMemory,
    drafting_step_bytes,
    in_words,
    step_bytes,
)
from rayloom_operator.resolve.stage_split import Stages, stages

# The engine gives KV blocks at most these shares of the memory that is free after the weights are loaded. On CPU, it
# also gives KV blocks at most 4 GiB. A contract test compares the numbers with the engine's.
GPU_SHARE = 0.9
CPU_SHARE = 0.5
CPU_CAP = 4 * GIB
# Estimates, rounded up. _CUDA_BYTES is for the CUDA context, libraries and their workspaces. _NCCL_BYTES is for NCCL's
# buffers, which exist only with several ranks.
_CUDA_BYTES = GIB
_NCCL_BYTES = GIB // 2
# Measured in pods on CPU: torch and the rank's own code take 380 MiB in each rank, and Ray's processes take 153 MiB in
# each pod. Mapped library files are not counted, because the kernel can drop their pages.
CPU_RANK_BYTES = 384 << 20
RAY_POD_BYTES = 168 << 20
# If the spec leaves out maxModelLen, the context length is cut until the model fits. If the engine does not cut the
# length itself (`engine_cuts_length`), the length stays at least this number, and a sixteenth of the cache stays
# unused. The engine measures the free memory itself, and would refuse to start if a request of the cut length needed a
# few bytes more than are free.
_LEAST_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of one candidate: a tensor size and a number of stages."""

    weights: int  # bytes of weights on the rank with the most weights
    fullest: RankMemory  # the rank with the most weights of both the model and its draft model
    adapters: int  # bytes for LoRA adapters on the rank with the most such bytes
    reserve: int  # bytes that a rank's process needs beside weights and KV cache, copies of KV blocks included
    room: int  # bytes for KV blocks on the rank that has room for the fewest blocks
    block_bytes: int  # bytes of one KV block on that rank
    num_blocks: int  # KV blocks that the engine allocates
    is_given: bool  # the spec gives the number or the bytes of KV blocks
    length: int  # context length: the largest number of tokens of a request
    least: int  # shortest context length that is acceptable
    is_too_heavy: bool  # no memory is left for KV blocks
    has_too_many_blocks: bool  # the spec asks for more blocks than there is room for
    has_too_few_blocks: bool  # there are too few blocks for minConcurrentRequests requests of `length`

    @property
    def fits(self) -> bool:
        return not (self.is_too_heavy or self.has_too_many_blocks or self.has_too_few_blocks)


class Scale:
    """Computes and caches the loads of candidates with one tensor size. Candidates with equal `Stages` share a load."""

    def __init__(self, question: Question, tensor: int) -> None:
        costs = question.parts
        self._question = question
        self._tensor = tensor
        element_bytes = ELEMENT_BYTES[question.dtype]
        keeps_quantised = question.keeps_quantised
        draft = question.draft
        if draft is not None and question.is_cpu:
            # One rank of the last stage holds the draft model. The ranks of a stage share the memory of their pod, so
            # each of them counts an equal part of the weights.
            draft = replace(draft, weights=-(-draft.weights // tensor))
        self._cut = Cut(
            costs,
            tensor,
            element_bytes,
            keeps_quantised=keeps_quantised,
            adapters=question.adapters,
            draft=draft,
        )
        self._num_layers = costs.num_layers
        self._head_layers = costs.head_layers
        self._known: dict[Stages, Load] = {}

    def load(self, pipeline: int) -> Load:
        each = stages(self._num_layers, pipeline, self._head_layers)
        known = self._known.get(each)
        if known is None:
            known = self._known[each] = self._weigh(each, has_several_ranks=self._tensor * pipeline > 1)
        return known

    def _room(self, rank: RankMemory, memory: int | None, reserve: int) -> tuple[int, int, int]:
        """Returns for a rank: (number of KV blocks that fit, bytes of one block, bytes for all blocks).

        `memory`: the bytes that the rank has; None if unknown. The rank's process needs `reserve` bytes of them.
        """
        free = None if memory is None else memory - reserve - rank.weights - rank.draft
        room = _kv_room(self._question, self._tensor, free, rank)
        block_bytes = max(1, rank.kv_block)
        return room // block_bytes, block_bytes, room

    def _weigh(self, each: Stages, *, has_several_ranks: bool) -> Load:
        question = self._question
        ranks = self._cut.ranks(each)
        fullest = RankMemory(0, 0)
        weights = adapters = 0
        for rank in ranks:  # a loop is faster here than calls of max with a key
            weights = max(weights, rank.weights)
            adapters = max(adapters, rank.adapters)
            if rank.weights + rank.draft > fullest.weights + fullest.draft:
                fullest = rank
        memory = question.memory
        reserve = _CUDA_BYTES + _NCCL_BYTES * has_several_ranks
        if question.is_cpu:
            memory = None if memory is None else memory // self._tensor
            reserve = CPU_RANK_BYTES + RAY_POD_BYTES // self._tensor + (question.kv_host_memory_bytes or 0)
        # All ranks have the same number of blocks, so the rank with room for the fewest blocks determines the number.
        num_blocks, block_bytes, kv_bytes = min(self._room(rank, memory, reserve) for rank in ranks)
        largest = max(1, *(rank.kv_block for rank in ranks))
        given = question.num_kv_blocks or (question.kv_cache_memory_bytes or 0) // largest
        has_too_many = given > num_blocks and not question.is_cpu
        num_blocks = given or num_blocks

        wanted = question.max_model_len or question.shape.max_position_embeddings
        per_request = num_blocks // question.num_requests
        length = least = wanted
        if question.max_model_len is None and per_request < question.num_blocks_of(wanted):
            least = 2 if question.engine_cuts_length else min(wanted, _LEAST_MODEL_LEN)
            kept = per_request if question.engine_cuts_length else per_request * 15 // 16
            length = max(least, kept * BLOCK_SIZE)
        return Load(
            weights=weights,
            fullest=fullest,
            adapters=adapters,
            reserve=reserve,
            room=kv_bytes,
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            is_given=given > 0,
            length=length,
            least=least,
            is_too_heavy=memory is not None and fullest.weights + fullest.draft + adapters + reserve >= memory,
            has_too_many_blocks=has_too_many,
            has_too_few_blocks=per_request < question.num_blocks_of(length),
        )


def why_not(question: Question, tensor: int, load: Load) -> str:
    """Returns a sentence that says why a candidate does not fit; empty if it fits."""
    if load.is_too_heavy:
        memory = (question.memory or 0) // (tensor if question.is_cpu else 1)
        draft = _draft_in_words(question, load.fullest.draft)
        others = f"{draft}, {in_words(load.adapters)} for LoRA adapters" if load.adapters else draft
        copies = question.kv_host_memory_bytes or 0
        others += f", {in_words(copies)} for copies of KV blocks" if copies else ""
        weights = in_words(load.fullest.weights)
        process = f"{weights} of weights{others} and {in_words(load.reserve - copies)} for the process"
        return f"{process} do not fit in {in_words(memory)}"
    if load.has_too_many_blocks:
        needed = in_words(load.num_blocks * load.block_bytes)
        return f"{load.num_blocks} KV blocks need {needed} on a rank, and there is room for {in_words(load.room)}"
    if load.has_too_few_blocks:
        needed = in_words(question.num_requests * question.num_blocks_of(load.least) * load.block_bytes)
        room = in_words(load.num_blocks * load.block_bytes)
        return (
            f"{question.num_requests} x {load.least} tokens need {needed} of KV cache on a rank, and there is room for "
            f"{room}"
        )
    return ""


def _draft_in_words(question: Question, held: int) -> str:
    """Returns the part of `why_not` about the draft model; empty without one. `held`: its bytes that a rank counts."""
    if not held or question.draft is None:
        return ""
    if held == question.draft.weights:
        return f", {in_words(held)} of the draft model's weights"
    return f", {in_words(held)} as its part of the {in_words(question.draft.weights)} of the draft model's weights"


def _kv_room(question: Question, tensor: int, free: int | None, rank: RankMemory) -> int:
    """Returns the bytes that the engine allocates for KV blocks if `rank` has `free` bytes (None: unknown)."""
    if free is None:
        return CPU_CAP // tensor
    step = step_bytes(
        question.parts,
        tensor,
        element_bytes=ELEMENT_BYTES[question.dtype],
        num_tokens=question.most_step_tokens,
        num_seqs=question.most_rows,
    )
    if rank.draft and question.draft is not None:
        step = drafting_step_bytes(
            step,
            question.draft,
            num_tokens=question.most_step_tokens,
            num_rows=question.most_rows,
            hidden_size=question.shape.hidden_size,
            vocab_size=question.shape.vocab_size,
        )
    if not question.is_cpu:
        return max(0, min(int(free * GPU_SHARE), free - step))
    room = min(CPU_CAP // tensor, int(free * CPU_SHARE))
    # Without adapters and a draft model, no step is subtracted. The half that CPU_SHARE leaves free is usually enough
    # for a step, but not always: the engine measures its memory and its threads, and allocates fewer blocks if a step
    # needs more than that half. Its buffers for attention over a long context, which grow with the threads, are in
    # neither formula: the engine makes room for them only if a request of its length then still fits.
    return max(0, min(room, free - step - rank.adapters) if rank.adapters or rank.draft else room)
