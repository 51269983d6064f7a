"""Properties of every sizing, on costs and machines that hypothesis generates."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_operator.errors import DoesNotFit
from rayloom_operator.resolve.question import GPU_STEP_TOKENS
from rayloom_operator.resolve.rank_memory import BLOCK_SIZE, Cut
from rayloom_operator.resolve.sizing import candidates, size
from rayloom_operator.resolve.stage_split import split_layers, stages
from rt_shapes import GIB, SMOLLM2, make_costs, make_question, with_context


@st.composite
def models(draw):
    """Facts of models from one million parameters up to 500 billion, with layers of one kind or two."""
    tensor = tuple(sorted({1, *draw(st.sets(st.sampled_from((2, 3, 4, 6, 8, 16, 32))))}))
    num_kinds = draw(st.integers(1, 2))
    layers = draw(st.text(alphabet="ab"[:num_kinds], min_size=1, max_size=96))
    vocabulary = draw(st.integers(1 << 12, 1 << 31))
    costs = make_costs(
        tensor=tensor,
        layers=layers,
        weights=[draw(st.integers(1 << 15, 5 << 30)) for _ in range(num_kinds)],
        kv=[draw(st.integers(64, 1 << 16)) for _ in range(num_kinds)],
        packed=[draw(st.integers(0, 1 << 30)) for _ in range(num_kinds)],
        windows=[draw(st.none() | st.integers(1, 8192)) for _ in range(num_kinds)],
        embedding=vocabulary,
        head=vocabulary,
        both=draw(st.sampled_from((1, 2))) * vocabulary,
        head_layers=draw(st.floats(0, 40)),
    )
    facts = SMOLLM2.model_copy(update={"costs": costs})
    return with_context(facts, draw(st.sampled_from((2048, 8192, 131_072))))


@st.composite
def questions(draw):
    question = make_question(
        draw(models()),
        draw(st.integers(2, 141)),
        draw(st.integers(1, 8)),
        num_requests=draw(st.integers(1, 64)),
        pipeline=draw(st.none() | st.integers(1, 4)),
    )
    if (question.pipeline or 0) > question.costs.num_layers:
        return replace(question, pipeline=None)
    return question


def sized(question):
    try:
        return size(question)
    except DoesNotFit:
        return None


@settings(deadline=None, print_blob=True)
@given(questions())
def test_the_choice_is_possible_and_nothing_cheaper_fits(question):
    found = sized(question)
    ways = candidates(question, {})
    if found is None:
        assert not any(way.fits for way in ways)
        return
    assert found.tensor in question.costs.tensor
    assert found.pipeline <= question.costs.num_layers
    assert found.pipeline % found.pods == 0
    assert found.tensor <= question.per_node
    assert found.num_ranks // found.pods <= question.per_node
    assert found.nodes <= found.pods
    assert found.num_ranks <= found.nodes * question.per_node
    assert question.num_requests <= found.concurrent_requests <= 64
    assert found.max_model_len <= question.shape.max_position_embeddings
    assert all(way.num_ranks >= found.num_ranks for way in ways if way.fits)
    assert len(found.alternatives) <= 8


@settings(deadline=None, print_blob=True)
@given(questions(), st.integers(1, 64))
def test_more_memory_never_needs_more_accelerators(question, more_gib):
    found, with_more = sized(question), sized(replace(question, memory=question.memory + more_gib * GIB))
    if found is not None:
        assert with_more is not None
        assert with_more.num_ranks <= found.num_ranks


@settings(deadline=None, print_blob=True)
@given(questions())
def test_no_two_ways_cost_the_same(question):
    costs = [(way.num_ranks, way.nodes, way.pipeline) for way in candidates(question, {})]

    assert costs == sorted(set(costs))


@settings(deadline=None, print_blob=True)
@given(questions())
def test_a_candidate_that_fits_leaves_room_for_weights_and_a_step(question):
    found = sized(question)
    if found is not None:
        step = GPU_STEP_TOKENS * question.costs.step.token.elements[question.costs.tensor.index(found.tensor)] * 2
        assert found.weights_bytes_per_rank + step < question.memory


@settings(deadline=None, print_blob=True)
@given(models(), st.data())
def test_no_stage_has_more_than_its_ranks_are_sized_for(facts, data):
    """The size is compared with the layers of every stage of the split."""
    costs = facts.costs
    pipeline = data.draw(st.integers(1, costs.num_layers))
    kinds = [kind for number, kind in costs.runs for _ in range(number)]
    split = split_layers(costs.num_layers, pipeline, costs.head_layers)
    found = Cut(costs, 1, 2).ranks(stages(costs.num_layers, pipeline, costs.head_layers))
    start = 0
    heaviest = most_kv = 0
    for stage, number in enumerate(split):
        own = [costs.kinds[kind] for kind in kinds[start : start + number]]
        start += number
        ends = costs.both if pipeline == 1 else costs.embedding if stage == 0 else costs.head
        weights = sum(kind.weights.bytes_at(0, 2) for kind in own)
        weights += ends.bytes_at(0, 2) if stage in (0, pipeline - 1) else 0
        heaviest = max(heaviest, weights)
        most_kv = max(most_kv, sum(kind.kv.bytes_at(0, 2) for kind in own) * BLOCK_SIZE)
    assert max(rank.weights for rank in found) >= heaviest
    assert max(rank.kv_block for rank in found) >= most_kv
    if len(set(kinds)) == 1:
        assert max(rank.weights for rank in found) == heaviest
        assert max(rank.kv_block for rank in found) == most_kv
