"""The costs of a model: their parts checked by hand, and the length of an inspection's document.

The comparison with the engine's allocations is in tests/contract/test_sizing.py.
"""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.models.checkpoint import limits
from rayloom_engine.models.checkpoint.source import ResolvedModel
from rayloom_engine.models.costs import model_costs, run_lengths
from rayloom_engine.models.inspection import MAX_FACTS_BYTES, facts
from rayloom_engine.models.shard_counts import shard_counts
from rt_facts import WELL_KNOWN, make_shape, shape_of, shapes

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def text_of(shape):
    return facts(ResolvedModel(path=Path(), source="", commit=COMMIT), shape).text()


def test_each_part_is_that_of_the_rank_with_most_of_it():
    shape = make_shape(layer_windows=(16, None))
    costs = model_costs(shape, shard_counts(shape))

    assert costs.tensor == (1, 2, 4)
    # 33 rows of 8: halves have 17 and 16 rows, quarters 9 and 8. The head includes the final norm of 8.
    assert costs.embedding.elements == (264, 136, 72)
    assert costs.head.elements == (272, 144, 80)
    assert costs.both.elements == (536, 280, 152)
    full, windowed = costs.kinds[1], costs.kinds[0]
    assert (windowed.window, full.window, costs.layers) == (16, None, "ab")
    # q and o have 8 x 16 elements, k and v have 8 x 8, the feed-forward has 3 x 8 x 15, and the norms have 2 x 8. Of 15
    # rows, one of two ranks has at most 8, and one of four ranks at most 4. Each of four ranks has one of the two
    # key/value heads.
    assert full.weights.elements == windowed.weights.elements == (760, 400, 240)
    assert full.kv.elements == (16, 8, 8)
    # 3 x 8, and the larger of 3 x 15 / tensor (rounded up) and 2 x (16 + 8) / tensor.
    assert costs.step.token.elements == (24 + 48, 24 + 24, 24 + 12)
    assert costs.step.sequence_bytes == 3 * 33 * 4
    # At LoRA rank 1, q, k and v have 3 x 8 + 16 + 2 x 8 numbers, o has 16 + 8, gate and up have 2 x 8 + 2 x 15, and
    # down has 15 + 8.
    assert costs.adapters.layer.elements == (56 + 24 + 46 + 23, 40 + 16 + 32 + 16, 36 + 12 + 24 + 12)
    assert costs.adapters.token_bytes == (3072 + 8 * 15, 3072 + 8 * 8, 3072 + 8 * 4)
    assert costs.checkpoint_bytes == 2 * shape.num_parameters == 2 * (2 * 760 + 536)


def test_a_shared_matrix_is_there_once_where_one_stage_has_both_uses():
    costs = model_costs(make_shape(tie_word_embeddings=True), (1,))

    assert (costs.both.elements, costs.embedding.elements, costs.head.elements) == ((272,), (264,), (272,))


def test_biases_of_sums_are_the_first_ranks():
    without, with_biases = (model_costs(make_shape(o_bias=each, mlp_bias=each), (1, 4)) for each in (False, True))

    # A single rank has biases of 2 x 15 (gate, up), 8 (down) and 8 (o). Of four ranks, the last is the largest. With 4
    # rows and 8 biases it has 248 elements. With 3 rows and 6 + 8 + 8 biases the first rank has 238 elements.
    assert with_biases.kinds[0].weights.elements[0] - without.kinds[0].weights.elements[0] == 46
    assert with_biases.kinds[0].weights.elements[1] - without.kinds[0].weights.elements[1] == 8


@given(st.lists(st.integers(0, 25), min_size=1, max_size=300))
def test_run_lengths_encode_every_layer_in_no_more_letters_than_layers(kinds):
    text = run_lengths(kinds)

    assert len(text) <= len(kinds)
    runs = re.findall(r"(\d*)([a-z])", text)
    assert [ord(kind) - ord("a") for number, kind in runs for _ in range(int(number or 1))] == kinds


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_the_facts_of_published_models_are_short(name):
    assert len(text_of(shape_of(name)).encode()) < 1300


ALTERNATING = (4096, None) * 100
WORST = {
    "alternating windows of 200 layers": make_shape(num_layers=200, layer_windows=ALTERNATING),
    "alternating windows of 1000 layers": make_shape(num_layers=1000, layer_windows=ALTERNATING * 5),
    "heads with 48 divisors": make_shape(num_heads=2520, num_kv_heads=2520, intermediate_size=2520, vocab_size=2520),
    "all of it, large": make_shape(
        num_layers=1000,
        layer_windows=(1 << 30, None) * 500,
        num_heads=2520,
        num_kv_heads=2520,
        hidden_size=1 << 18,
        intermediate_size=1 << 18,
        vocab_size=limits.MAX_VOCAB,
        max_position_embeddings=limits.MAX_POSITIONS,
        qkv_bias=True,
    ),
}


@pytest.mark.parametrize("name", WORST)
def test_the_facts_of_the_worst_models_are_short_enough(name):
    shape = WORST[name]
    text = text_of(shape)
    costs = json.loads(text)["costs"]

    print(f"{name}: {len(text)} bytes, {len(costs['tensor'])} of {len(shard_counts(shape))} numbers of ranks")
    assert len(text.encode()) <= MAX_FACTS_BYTES
    # `tensor` has the possible tensor-parallel sizes in ascending order. If all of them would exceed MAX_FACTS_BYTES,
    # the largest are left out.
    assert costs["tensor"] == list(shard_counts(shape))[: len(costs["tensor"])]
    assert len(costs["tensor"]) >= min(8, len(shard_counts(shape)))


@settings(deadline=None, print_blob=True)
@given(shapes())
def test_the_facts_of_any_model_are_short_enough_and_whole(shape):
    text = text_of(shape)
    costs = json.loads(text)["costs"]

    assert len(text.encode()) <= MAX_FACTS_BYTES
    numbers = len(costs["tensor"])
    assert numbers >= 1
    parts = [costs["embedding"], costs["head"], costs["both"], costs["step"]["token"]]
    parts += [part for kind in costs["kinds"] for part in (kind["weights"], kind["kv"])]
    parts += [costs["adapters"]["layer"], {"elements": costs["adapters"]["token_bytes"]}]
    assert {len(part["elements"]) for part in parts} == {numbers}
