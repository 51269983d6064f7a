"""What holds of every sizing, on shapes and machines that hypothesis makes up."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_operator.api.model_facts import ModelShape
from rayloom_operator.errors import DoesNotFit
from rayloom_operator.resolve.sizing import GPU_STEP_TOKENS, candidates, size
from rt_shapes import GIB, make_question


@st.composite
def shapes(draw):
    num_kv_heads = draw(st.sampled_from((1, 2, 3, 4, 8)))
    return ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=draw(st.integers(1, 96)),
        hidden_size=64 * draw(st.integers(1, 128)),
        intermediate_size=draw(st.integers(64, 30_000)),
        num_heads=num_kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from((64, 128))),
        vocab_size=draw(st.integers(64, 160_000)),
        max_position_embeddings=draw(st.sampled_from((2048, 8192, 131_072))),
        tie_word_embeddings=draw(st.booleans()),
        checkpoint_dtype="bfloat16",
    )


@st.composite
def questions(draw):
    question = make_question(
        draw(shapes()),
        draw(st.integers(2, 141)),
        draw(st.integers(1, 8)),
        num_requests=draw(st.integers(1, 64)),
        pipeline=draw(st.none() | st.integers(1, 4)),
    )
    if (question.pipeline or 0) > question.shape.num_layers:
        return replace(question, pipeline=None)
    return question


def sized(question):
    try:
        return size(question)
    except DoesNotFit:
        return None


@settings(deadline=None, print_blob=True)
@given(questions())
def test_what_is_chosen_can_be_and_nothing_cheaper_fits(question):
    found = sized(question)
    ways = candidates(question)
    if found is None:
        assert not any(way.fits for way in ways)
        return
    heads, kv_heads = question.shape.num_heads, question.shape.num_kv_heads
    assert heads % found.tensor == 0
    assert kv_heads % found.tensor == 0 or found.tensor % kv_heads == 0
    assert found.pipeline <= question.shape.num_layers
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
    costs = [(way.num_ranks, way.nodes, way.pipeline) for way in candidates(question)]

    assert costs == sorted(set(costs))


@settings(deadline=None, print_blob=True)
@given(questions())
def test_what_fits_leaves_room_for_weights_and_a_step(question):
    found = sized(question)
    if found is not None:
        step = GPU_STEP_TOKENS * 3 * question.shape.hidden_size * 2
        assert found.weights_bytes_per_rank + step < question.memory
