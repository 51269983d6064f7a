"""The figures that `rayloom-operator plan` computes for a published model."""

from __future__ import annotations

from rayloom_operator.api.costs import ELEMENT_BYTES
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.sizing_status import SizingStatus
from rayloom_operator.errors import DoesNotFit
from rayloom_operator.resolve.question import Question
from rayloom_operator.resolve.rank_memory import GIB, Cut
from rayloom_operator.resolve.sizing import size
from rayloom_operator.resolve.stage_split import split_layers, stages

_CARD = 80 * GIB
_PER_NODE = 8


def planned_bytes(facts: ModelFacts, tensor: int, pipeline: int, *, keeps_quantised: bool = False) -> int:
    """Returns the bytes of weights on the largest rank."""
    assert facts.costs is not None
    cut = Cut(facts.costs, tensor, ELEMENT_BYTES[facts.shape.checkpoint_dtype], keeps_quantised=keeps_quantised)
    of_stages = stages(facts.costs.num_layers, pipeline, facts.costs.head_layers)
    return max(rank.weights for rank in cut.ranks(of_stages))


def stage_layers(facts: ModelFacts, pipeline: int) -> tuple[range, ...]:
    """Returns the layers of each stage."""
    assert facts.costs is not None
    found = []
    start = 0
    for number in split_layers(facts.costs.num_layers, pipeline, facts.costs.head_layers):
        found.append(range(start, start + number))
        start += number
    return tuple(found)


def chosen(facts: ModelFacts, max_model_len: int = 8192) -> SizingStatus | None:
    """Returns the sizing on nodes of 8 cards with 80 GiB each; None if no shape fits."""
    question = Question(
        shape=facts.shape,
        costs=facts.costs,
        dtype=facts.shape.checkpoint_dtype,
        per_node=_PER_NODE,
        memory=_CARD,
        tensor=None,
        pipeline=None,
        max_model_len=min(max_model_len, facts.shape.max_position_embeddings),
        num_requests=1,
    )
    try:
        return size(question)
    except DoesNotFit:
        return None
