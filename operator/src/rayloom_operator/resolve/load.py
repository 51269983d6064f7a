"""Load: the memory that the ranks of one candidate need, compared with the memory that they have. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.api.model_facts import ELEMENT_BYTES
from rayloom_operator.resolve.question import GPU_STEP_TOKENS, Question
from rayloom_operator.resolve.rank_memory import BLOCK_SIZE, GIB, Cut, RankMemory, in_words, step_bytes
from rayloom_operator.resolve.stage_split import Stages, stages

# The engine's shares of the memory that is free once the weights are loaded; a contract test compares them.
GPU_SHARE = 0.9
CPU_SHARE = 0.5
CPU_CAP = 4 * GIB
# A CUDA context, libraries and their workspaces; several ranks have NCCL's buffers too. Estimates, rounded up.
_CUDA_BYTES = GIB
_NCCL_BYTES = GIB // 2
# On a CPU, measured in pods: torch and the rank's own code take 380 MiB, Ray's processes 153 MiB of a pod. Files of
# libraries are not counted, because the kernel reclaims their pages.
CPU_RANK_BYTES = 384 << 20
RAY_POD_BYTES = 168 << 20
# If maxModelLen is left out, the context is cut to make a model fit, but not below this. A sixteenth of the cache
# stays unused: the engine measures free memory itself, and would refuse a context over a few bytes.
_LEAST_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The memory that the ranks of one candidate need, and whether they have it."""

    weights: int  # bytes of the rank with the most
    reserve: int  # bytes for a rank's process
    room: int  # bytes for KV blocks, of the rank with the fewest blocks
    block_bytes: int  # of a KV block of that rank
    num_blocks: int  # KV blocks that the engine allocates
    is_given: bool  # the spec chose that number
    length: int  # tokens of a request
    least: int  # tokens of a request that must have room
    is_too_heavy: bool  # weights and process alone are too much
    has_too_many_blocks: bool  # the spec asks for more blocks than there is room for
    has_too_few_blocks: bool  # minConcurrentRequests have no room

    @property
    def fits(self) -> bool:
        return not (self.is_too_heavy or self.has_too_many_blocks or self.has_too_few_blocks)


class Scale:
    """Computes the loads of candidates of one width, once for numbers of stages with the same kinds of stages."""

    def __init__(self, question: Question, tensor: int) -> None:
        costs = question.parts
        self._question = question
        self._tensor = tensor
        self._cut = Cut(costs, tensor, ELEMENT_BYTES[question.dtype])
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
        """KV blocks that the engine allocates on a rank, the bytes of one, and the bytes that it has for them.

        `memory` is the rank's, in bytes, or None where it is unknown; its process takes `reserve` of them.
        """
        free = None if memory is None else memory - reserve - rank.weights
        room = _kv_room(self._question, self._tensor, free)
        block_bytes = max(1, rank.kv_block)
        return room // block_bytes, block_bytes, room

    def _weigh(self, each: Stages, *, has_several_ranks: bool) -> Load:
        question = self._question
        ranks = self._cut.ranks(each)
        weights = max(rank.weights for rank in ranks)
        memory = question.memory
        reserve = _CUDA_BYTES + _NCCL_BYTES * has_several_ranks
        if question.is_cpu:
            memory = None if memory is None else memory // self._tensor
            reserve = CPU_RANK_BYTES + RAY_POD_BYTES // self._tensor
        # The rank with the fewest blocks decides for all.
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
            reserve=reserve,
            room=kv_bytes,
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            is_given=given > 0,
            length=length,
            least=least,
            is_too_heavy=memory is not None and weights + reserve >= memory,
            has_too_many_blocks=has_too_many,
            has_too_few_blocks=per_request < question.num_blocks_of(length),
        )


def why_not(question: Question, tensor: int, load: Load) -> str:
    """Why a candidate does not fit, as a sentence; empty where it fits."""
    if load.is_too_heavy:
        memory = (question.memory or 0) // (tensor if question.is_cpu else 1)
        process = f"{in_words(load.weights)} of weights and {in_words(load.reserve)} for the process"
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


def _kv_room(question: Question, tensor: int, free: int | None) -> int:
    """Bytes that the engine allocates for KV blocks, of `free` ones of a rank; None where those are unknown."""
    if free is None:
        return CPU_CAP // tensor
    if question.is_cpu:
        return max(0, min(CPU_CAP // tensor, int(free * CPU_SHARE)))
    step = step_bytes(
        question.parts,
        tensor,
        element_bytes=ELEMENT_BYTES[question.dtype],
        num_tokens=question.num_step_tokens or GPU_STEP_TOKENS,
        num_seqs=question.most_seqs,
    )
    return max(0, min(int(free * GPU_SHARE), free - step))
