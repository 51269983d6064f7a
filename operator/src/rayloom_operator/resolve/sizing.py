"""Chooses the parallelism of an engine: tensor parallelism inside a node, pipeline stages across nodes. Pure.

A candidate has one stage with any tensor size that the model's heads and a node allow, or several stages with the
largest of these tensor sizes. Of the candidates that fit, the one with the fewest accelerators is chosen. Among
candidates with equally many accelerators, the one with the fewest nodes is chosen, then the one with the fewest stages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from rayloom_operator.api.sizing_status import Candidate, SizedShape, SizingStatus
from rayloom_operator.errors import DoesNotFit, SpecError
from rayloom_operator.resolve.load import Load, Scale, why_not
from rayloom_operator.resolve.question import Question
from rayloom_operator.resolve.rank_memory import BLOCK_SIZE

_MAX_ALTERNATIVES = 8
# The largest number in a status: the API server stores 64-bit integers.
_MOST = (1 << 63) - 1


def size(question: Question) -> SizingStatus:
    """Returns the cheapest candidate that fits, among those with the numbers that the spec gives.

    `question` must have costs. Raises SpecError if the model does not support the spec's numbers, and DoesNotFit if
    there is too little memory. Both messages name what to change.
    """
    if problems := _problems(question):
        raise SpecError(problems)
    scales: dict[int, Scale] = {}
    considered = candidates(question, scales)
    is_open = question.tensor is None and question.pipeline is None
    # `scales` can be reused: a load depends only on the candidate's numbers, not on the numbers in the spec.
    others = considered if is_open else candidates(replace(question, tensor=None, pipeline=None), scales)
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
    return SizingStatus(**figures, advice=advice, inputs=question.inputs, alternatives=tuple(rest[-_MAX_ALTERNATIVES:]))


def candidates(question: Question, scales: dict[int, Scale]) -> list[Candidate]:
    """Returns the candidates, the cheapest first. Each has the tensor and pipeline sizes that the spec sets.

    Some candidates do not fit because they have too few stages. Of these, only those with the most stages are returned,
    at most as many as `status.sizing.alternatives` can have. `scales` caches the loads by tensor size, and is filled
    here.
    """
    widths = [count for count in question.parts.tensor if count <= (question.per_node or 1)]
    if question.tensor is not None:
        widths = [question.tensor]
    found = []
    for tensor in widths:
        most = question.parts.max_pipeline if tensor == widths[-1] else 1
        numbers = [question.pipeline] if question.pipeline is not None else range(1, most + 1)
        scale = scales.setdefault(tensor, Scale(question, tensor))
        tried: deque[int] = deque(maxlen=_MAX_ALTERNATIVES + 1)
        for pipeline in numbers:
            tried.append(pipeline)
            if scale.load(pipeline).fits:
                break  # candidates with more stages need more accelerators, so they are not chosen
        found += [_candidate(question, tensor, pipeline, scale.load(pipeline)) for pipeline in tried]
    return sorted(found, key=cost)


def _candidate(question: Question, tensor: int, pipeline: int, load: Load) -> Candidate:
    num_blocks = load.num_blocks if load.fits else 0
    length = load.length if load.fits else 0
    if not load.is_given:
        # The engine allocates no more blocks than `most_seqs` sequences of this length can use.
        num_blocks = min(num_blocks, question.most_seqs * question.num_blocks_of(length))
    pods, nodes = places(question.per_node, tensor, pipeline)
    return Candidate(
        tensor=tensor,
        pipeline=pipeline,
        pods=pods,
        nodes=nodes,
        weights_bytes_per_rank=load.weights,
        adapters_bytes_per_rank=load.adapters or None,
        draft_weights_bytes=None if question.draft is None else question.draft.weights,
        kv_tokens=min(num_blocks * BLOCK_SIZE, _MOST),
        max_model_len=length,
        concurrent_requests=num_blocks // max(1, question.num_blocks_of(length)),
        fits=load.fits,
        why_not=why_not(question, tensor, load),
    )


def places(per_node: int | None, tensor: int, pipeline: int) -> tuple[int, int]:
    """Returns (worker pods, nodes for them).

    On CPU a pod has one stage. On accelerators, the number of stages of a pod is the largest divisor of `pipeline` for
    which the pod fits on a node.
    """
    if per_node is None:
        return pipeline, pipeline
    most = max(1, min(pipeline, per_node // tensor))
    stages = max(n for n in range(1, most + 1) if pipeline % n == 0)
    pods = pipeline // stages
    return pods, -(-pods // max(1, per_node // (tensor * stages)))


def _problems(question: Question) -> tuple[str, ...]:
    shape = question.shape
    choices = question.parts.tensor
    most = question.parts.max_pipeline
    stages = ", and for more ranks spec.parallelism.pipeline" if most > 1 else ""
    found = []
    if question.tensor is not None and question.tensor not in choices:
        found.append(
            f"spec.parallelism.tensor: {question.tensor} ranks cannot share a layer of {shape.architecture}; use "
            f"{'one of ' if len(choices) > 1 else ''}{', '.join(map(str, choices))}{stages}"
        )
    if question.pipeline is not None and question.pipeline > most:
        number = question.parts.num_layers
        reason = "" if most == number else ", because a layer reads more than the output of the layer before it"
        found.append(
            f"spec.parallelism.pipeline: {question.pipeline} stages cannot share the model's {number} layers{reason}; "
            f"use {'1' if most == 1 else f'1 to {most}'}"
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
    fewer = "" if question.adapters is None else ", or lower spec.engine.args.maxLoras or maxLoraRank"
    fewer += "" if question.draft is None else ", or use a smaller model in spec.model.draft, or none"
    if question.kv_host_memory_bytes:
        fewer += ", or lower spec.engine.args.kvHostMemoryBytes"
    if best is not None and best not in considered:
        return f"{said}; use tensor {best.tensor} and pipeline {best.pipeline}, which fit{fewer}"
    if question.is_cpu:
        return f"{said}; raise spec.engine.resources.limits.memory{fewer}"
    cure = "lower spec.model.maxModelLen, or use accelerators with more memory or more of them on a node"
    return f"{said}; {cure}{fewer}"


def cost(way: SizedShape) -> tuple[int, int, int]:
    """Returns the sort key of a candidate: accelerators, nodes, stages. No two candidates have the same key."""
    return way.num_ranks, way.nodes, way.pipeline
