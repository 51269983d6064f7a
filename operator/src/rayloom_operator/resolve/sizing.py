"""The number of ranks of an engine: tensor parallelism inside a node, pipeline stages across nodes. Pure.

Candidates are one stage of each width that the model's heads and a node allow, and several stages of the widest. The
cheapest candidate that fits wins: the fewest accelerators, then the fewest nodes, then the fewest stages.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass, fields, replace

from rayloom_operator.api.costs import Costs
from rayloom_operator.api.model_facts import ELEMENT_BYTES, ModelShape
from rayloom_operator.api.status import Candidate, Figures, Sizing
from rayloom_operator.errors import DoesNotFit, SpecError
from rayloom_operator.resolve.rank_memory import BLOCK_SIZE, GIB, Cut, Rank, in_words, step_bytes
from rayloom_operator.resolve.stage_split import Stages, stages

# The engine's own defaults; a contract test compares them.
MAX_NUM_SEQS = 64
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 8192
# The engine's shares of the memory that is free once the weights are loaded.
GPU_SHARE = 0.9
CPU_SHARE, CPU_CAP = 0.5, 4 * GIB
# A CUDA context, libraries and their workspaces; several ranks have NCCL's buffers too. Estimates, rounded up.
_CUDA_BYTES, _NCCL_BYTES = GIB, GIB // 2
# On a CPU, measured in pods: torch and the rank's own code take 380 MiB, Ray's processes 153 MiB of a pod. Files of
# libraries are not counted, because the kernel reclaims their pages.
CPU_RANK_BYTES, RAY_POD_BYTES = 384 << 20, 168 << 20
# Where maxModelLen is left out, the context is cut to make a model fit, but not below this. A sixteenth of the cache
# stays unused: the engine measures free memory itself, and would refuse a context over a few bytes.
_LEAST_MODEL_LEN = 8192
_MAX_ALTERNATIVES = 8
# The largest number that a status can hold.
_MOST = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that a sizing depends on."""

    shape: ModelShape  # of the model, for the hash and the messages
    dtype: str  # of weights and KV cache
    per_node: int | None  # accelerators of a node; None on CPU
    memory: int | None  # bytes of an accelerator, on CPU of a pod; None where the memory is unknown
    tensor: int | None  # None: to be computed
    pipeline: int | None
    max_model_len: int | None  # None: the model's, or what fits
    num_requests: int  # that must have room at once
    # None where an engine of an earlier version inspected the model. Costs are no part of the hash: another engine may
    # count the same model differently, and that changes nothing that runs.
    costs: Costs | None = None
    # Settings of the engine, None for its default: a default may change with a version, the hash may not.
    max_num_seqs: int | None = None
    num_step_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_kv_blocks: int | None = None

    def num_blocks_of(self, num_tokens: int) -> int:
        """The most KV blocks that a sequence of `num_tokens` holds at once: the engine frees blocks that no token sees.

        The first token of a step sees span - 1 positions before it, which may begin in the middle of a block.
        """
        total = -(-num_tokens // BLOCK_SIZE)
        span = self.parts.attention_span
        if span is None:
            return total
        num_step_tokens = self.num_step_tokens or (CPU_STEP_TOKENS if self.is_cpu else GPU_STEP_TOKENS)
        return min(total, -(-(span - 1 + num_step_tokens) // BLOCK_SIZE) + 1)

    @property
    def parts(self) -> Costs:
        """The model's costs. Only for a question that has them."""
        assert self.costs is not None, "nothing is sized without costs"
        return self.costs

    @property
    def is_cpu(self) -> bool:
        return self.per_node is None

    @property
    def most_seqs(self) -> int:
        return self.max_num_seqs or MAX_NUM_SEQS

    @property
    def engine_cuts_length(self) -> bool:
        """Whether the engine chooses the length: on a CPU only the engine can measure the free memory."""
        return self.is_cpu and self.max_model_len is None and self.num_requests == 1

    @property
    def inputs(self) -> str:
        """8 hex digits, the same for the same question in every version of the operator."""
        shape = self.shape.model_dump(exclude_defaults=True)
        # `asdict` copies deeply, and each reconcile computes this hash.
        document = {each.name: getattr(self, each.name) for each in fields(self)} | {"shape": shape, "costs": None}
        given = {name: value for name, value in document.items() if value is not None}
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:8]


def size(question: Question) -> Sizing:
    """The cheapest candidate that fits; numbers that the spec gives stay as they are. `question` has costs.

    Raises SpecError for what the model cannot do, DoesNotFit for too little memory; both name what to change.
    """
    if problems := _problems(question):
        raise SpecError(problems)
    scales: dict[int, _Scale] = {}
    considered = _candidates(question, scales)
    is_open = question.tensor is None and question.pipeline is None
    # A load depends on no number that the spec gives for tensor and pipeline.
    others = considered if is_open else _candidates(replace(question, tensor=None, pipeline=None), scales)
    chosen = next((each for each in considered if each.fits), None)
    best = next((each for each in others if each.fits), None)
    if chosen is None:
        raise DoesNotFit((_refusal(question, considered, best),))
    advice = ""
    if best is not None and not question.is_cpu and chosen.num_ranks >= 2 * best.num_ranks:
        number = chosen.num_ranks // best.num_ranks
        advice = (
            f"{number} replicas of {best.shape} take no more accelerators than one of {chosen.shape}: an answer is "
            "slower, all together serve more."
        )
    rest = [] if question.is_cpu else sorted({*considered, *others} - {chosen}, key=cost)
    figures = chosen.model_dump(exclude={"fits", "why_not"})
    return Sizing(**figures, advice=advice, inputs=question.inputs, alternatives=tuple(rest[-_MAX_ALTERNATIVES:]))


def candidates(question: Question) -> list[Candidate]:
    """The candidates, the cheapest first. A number that the spec gives is in all of them.

    Of the numbers of stages that do not fit, only the largest are given, as many as a status shows.
    """
    return _candidates(question, {})


def _candidates(question: Question, scales: dict[int, _Scale]) -> list[Candidate]:
    """`candidates`, with the loads by width that are known, or become known."""
    widths = [count for count in question.parts.tensor if count <= (question.per_node or 1)]
    if question.tensor is not None:
        widths = [question.tensor]
    num_layers = question.parts.num_layers
    found = []
    for tensor in widths:
        most = num_layers if tensor == widths[-1] else 1
        numbers = [question.pipeline] if question.pipeline is not None else range(1, most + 1)
        scale = scales.setdefault(tensor, _Scale(question, tensor))
        tried: deque[int] = deque(maxlen=_MAX_ALTERNATIVES + 1)
        for pipeline in numbers:
            tried.append(pipeline)
            if scale.load(pipeline).fits:
                break  # more stages cost more
        found += [_candidate(question, tensor, pipeline, scale.load(pipeline)) for pipeline in tried]
    return sorted(found, key=cost)


def candidate(question: Question, tensor: int, pipeline: int) -> Candidate:
    """The figures of one candidate, and whether it fits."""
    return _candidate(question, tensor, pipeline, _Scale(question, tensor).load(pipeline))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
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


class _Scale:
    """Computes the loads of candidates of one width, once for numbers of stages with the same kinds of stages."""

    def __init__(self, question: Question, tensor: int) -> None:
        costs = question.parts
        self._question = question
        self._tensor = tensor
        self._cut = Cut(costs, tensor, ELEMENT_BYTES[question.dtype])
        self._num_layers = costs.num_layers
        self._head_layers = costs.head_layers
        self._known: dict[Stages, _Load] = {}

    def load(self, pipeline: int) -> _Load:
        each = stages(self._num_layers, pipeline, self._head_layers)
        known = self._known.get(each)
        if known is None:
            known = self._known[each] = self._weigh(each, has_several_ranks=self._tensor * pipeline > 1)
        return known

    def _room(self, rank: Rank, memory: int | None, reserve: int) -> tuple[int, int, int]:
        """KV blocks that the engine allocates on a rank, the bytes of one, and the bytes that it has for them.

        `memory` is the rank's, in bytes, or None where it is unknown; its process takes `reserve` of them.
        """
        free = None if memory is None else memory - reserve - rank.weights
        room = _kv_room(self._question, self._tensor, free)
        block_bytes = max(1, rank.kv_block)
        return room // block_bytes, block_bytes, room

    def _weigh(self, each: Stages, *, has_several_ranks: bool) -> _Load:
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
        return _Load(
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


def _candidate(question: Question, tensor: int, pipeline: int, load: _Load) -> Candidate:
    num_blocks = load.num_blocks if load.fits else 0
    length = load.length if load.fits else 0
    if not load.is_given:
        # The engine allocates no more than what all sequences of a step can use.
        num_blocks = min(num_blocks, question.most_seqs * question.num_blocks_of(length))
    pods, nodes = places(question.per_node, tensor, pipeline)
    return Candidate(
        tensor=tensor,
        pipeline=pipeline,
        pods=pods,
        nodes=nodes,
        weights_bytes_per_rank=load.weights,
        kv_tokens=min(num_blocks * BLOCK_SIZE, _MOST),
        max_model_len=length,
        concurrent_requests=num_blocks // max(1, question.num_blocks_of(length)),
        fits=load.fits,
        why_not=_why_not(question, tensor, load),
    )


def _why_not(question: Question, tensor: int, load: _Load) -> str:
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


def places(per_node: int | None, tensor: int, pipeline: int) -> tuple[int, int]:
    """(worker pods, nodes that they fill). As many stages as a node holds share a pod; on CPU each has its own."""
    if per_node is None:
        return pipeline, pipeline
    most = max(1, min(pipeline, per_node // tensor))
    stages = max(n for n in range(1, most + 1) if pipeline % n == 0)
    pods = pipeline // stages
    return pods, -(-pods // max(1, per_node // (tensor * stages)))


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


def _problems(question: Question) -> tuple[str, ...]:
    shape = question.shape
    choices = question.parts.tensor
    num_layers = question.parts.num_layers
    found = []
    if question.tensor is not None and question.tensor not in choices:
        found.append(
            f"spec.parallelism.tensor: {question.tensor} ranks cannot share the model's {shape.num_heads} attention "
            f"heads and {shape.num_kv_heads} key/value heads evenly; use one of {', '.join(map(str, choices))}"
        )
    if question.pipeline is not None and question.pipeline > num_layers:
        found.append(
            f"spec.parallelism.pipeline: {question.pipeline} stages cannot share the model's {num_layers} "
            f"layers; use 1 to {num_layers}"
        )
    if (question.max_model_len or 0) > shape.max_position_embeddings:
        found.append(
            f"spec.model.maxModelLen: {question.max_model_len} is more than the model's "
            f"{shape.max_position_embeddings} positions; lower it"
        )
    if question.num_requests > question.most_seqs:
        found.append(
            f"spec.sizing.minConcurrentRequests: the engine computes {question.most_seqs} sequences at once; raise "
            f"spec.engine.args.maxNumSeqs to {question.num_requests} or more, or lower it"
        )
    return tuple(found)


def _refusal(question: Question, considered: list[Candidate], best: Candidate | None) -> str:
    last = considered[-1]
    even = "" if len(considered) == 1 else "even "
    said = f"spec.parallelism: {even}{last.shape} does not fit: {last.why_not}"
    if best is not None and best not in considered:
        return f"{said}; use tensor {best.tensor} and pipeline {best.pipeline}, which fit"
    if question.is_cpu:
        return f"{said}; raise spec.engine.resources.limits.memory"
    return f"{said}; lower spec.model.maxModelLen, or use accelerators with more memory or more of them on a node"


def cost(way: Figures) -> tuple[int, int, int]:
    """The key by which candidates are compared: accelerators, nodes, stages. No two candidates have the same."""
    return way.num_ranks, way.nodes, way.pipeline
