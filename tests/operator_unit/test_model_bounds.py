"""A tenant chooses the numbers in an inspection's result. No number blocks the operator when it reads the result.

All tenants share the operator's event loop. Without limits, some numbers would block the event loop for seconds or for
ever.
"""

import contextlib
import itertools
import json
import sys

import pytest

from rayloom_operator.api.sizing_status import stored_sizing
from rayloom_operator.api.status import Reason, stored_model
from rayloom_operator.errors import SpecError
from rayloom_operator.resolve.sizing import size
from rayloom_operator.resolve.stage_split import split_layers, stages
from rt_inspection import COMMIT, COSTS, HUB_MODEL, SHAPE, ended, facts, look
from rt_shapes import SMOLLM2, make_costs, make_question, stored

HUGE = 10**12
LOOP = dict.fromkeys(("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"), HUGE)


def said_with(**sizes):
    return json.dumps(json.loads(facts()) | {"shape": SHAPE | sizes})


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (LOOP, "shape.intermediate_size: Input should be less than or equal to 4194304"),
        ({"num_layers": 1001}, "shape.num_layers: Input should be less than or equal to 1000"),
        ({"num_layers": 0}, "shape.num_layers: Input should be greater than or equal to 1"),
        ({"num_heads": 0}, "shape.num_heads: Input should be greater than or equal to 1"),
        ({"num_kv_heads": 0}, "shape.num_kv_heads"),
        ({"hidden_size": 0}, "shape.hidden_size"),
        ({"head_dim": -1}, "shape.head_dim"),
        ({"vocab_size": (1 << 24) + 1}, "shape.vocab_size"),
        ({"max_position_embeddings": 0}, "shape.max_position_embeddings"),
        ({"num_heads": 4097}, "shape.num_heads"),
        ({"checkpoint_dtype": "int3"}, "shape.checkpoint_dtype: 'int3' is not a type of weights"),
        ({"architecture": "x" * 257}, "shape.architecture"),
    ],
)
def test_sizes_beyond_every_model_are_refused_with_their_name(sizes, words):
    seen = look(ended(said_with(**sizes)))

    assert (seen.facts, seen.verdict.reason) == (None, Reason.MODEL_UNSUPPORTED)
    assert words in seen.verdict.message


KIND = COSTS["kinds"][0]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"tensor": []}, "costs.tensor: Tuple should have at least 1 item"),
        ({"tensor": list(range(1, 66))}, "costs.tensor: Tuple should have at most 64 items"),
        ({"tensor": [2, 4]}, "costs: tensor: the numbers of ranks must ascend from 1"),
        ({"tensor": [1, 1]}, "costs: tensor: the numbers of ranks must ascend from 1"),
        ({"tensor": [1, 4097]}, "costs.tensor.1: Input should be less than or equal to 4096"),
        ({"tensor": [1, 2.5]}, "costs.tensor.1: Input should be a valid integer"),
        ({"embedding": {"elements": [1]}}, "costs: each list must have one number for each number in `tensor`"),
        (
            {"head": {"elements": [1, 1], "bytes": [1]}},
            "costs: each list must have one number for each number in `tensor`",
        ),
        ({"both": {"elements": [-1, 1]}}, "costs.both.elements.0: Input should be greater than or equal to 0"),
        ({"both": {"elements": [HUGE**2, 1]}}, "costs.both.elements.0: Input should be less than or equal to"),
        ({"both": {"elements": [1 << 51, 1]}}, "costs: the weights are those of a model with more than"),
        ({"both": {"elements": [0] * 10**3}}, "costs.both.elements: Tuple should have at most 64 items"),
        ({"layers": ""}, "costs.layers: String should match pattern"),
        ({"layers": "0a"}, "costs.layers: String should match pattern"),
        ({"layers": "99999a"}, "costs.layers: String should match pattern"),
        ({"layers": "a" * 1001}, "costs.layers: String should have at most 1000 characters"),
        ({"layers": "999a2a"}, "costs: layers: 1001 are more than 1000"),
        ({"layers": "2b"}, "costs: layers: a letter names a kind that `kinds` does not have"),
        ({"kinds": []}, "costs.kinds: Tuple should have at least 1 item"),
        ({"kinds": [KIND] * 27}, "costs.kinds: Tuple should have at most 26 items"),
        ({"kinds": [KIND | {"window": 0}]}, "costs.kinds.0.window: Input should be greater than or equal to 1"),
        ({"kinds": [KIND | {"weights": {"elements": [1 << 50, 1]}}]}, "costs: the weights are those of a model"),
        ({"head_layers": -1}, "costs.head_layers: Input should be greater than or equal to 0"),
        ({"head_layers": 1e300}, "costs.head_layers: Input should be less than or equal to"),
        ({"checkpoint_bytes": 0}, "costs.checkpoint_bytes: Input should be greater than or equal to 1"),
    ],
)
def test_costs_beyond_every_model_are_refused_with_the_name_of_the_part(part, words):
    seen = look(ended(facts(costs=COSTS | part)))

    assert (seen.facts, seen.verdict.reason) == (None, Reason.MODEL_UNSUPPORTED)
    assert words in seen.verdict.message
    assert len(seen.verdict.message) < 1000


@pytest.mark.parametrize(("version", "said"), [("v3", "of version v3, which"), ("v" * 3000, "of version vvvvvv")])
def test_an_inspection_of_a_later_version_is_refused_by_its_version(version, said):
    seen = look(ended(json.dumps(json.loads(facts()) | {"version": version})))

    assert (seen.facts, seen.verdict.reason) == (None, Reason.INSPECTION_FAILED)
    assert said in seen.verdict.message and "upgrade" in seen.verdict.message
    assert len(seen.verdict.message) < 400


@pytest.mark.parametrize(
    "words",
    [
        "[" * 4000,
        '{"costs":' * 400,
        '{"version": []}',
        '{"shape":' * 400,
        '{"error": {"reason": ["NotFound"], "message": "m"}}',
        '{"error": {"reason": "NotFound", "message": {}}}',
        '{"error": "NotFound"}',
        '"error"',
        "7",
        "[]",
        "null",
        '{"error": ' + "[" * 2000,
    ],
)
def test_messages_of_any_form_are_a_condition(words):
    seen = look(ended(words, code=1))

    assert seen.facts is None
    assert seen.verdict.reason in (Reason.INSPECTION_FAILED, Reason.MODEL_UNSUPPORTED)
    assert len(seen.verdict.message) < 1000


def test_a_long_message_of_a_job_is_cut():
    words = json.dumps({"version": "v1", "error": {"reason": "NotFound", "message": "x" * 4000}})

    assert len(look(ended(words, code=78)).verdict.message) < 1000


def test_a_stored_model_that_no_inspection_could_have_found_is_inspected_again():
    known = stored(SMOLLM2, HUB_MODEL["source"]) | {"commit": COMMIT}
    assert stored_model({"model": known}).costs == SMOLLM2.costs
    known["costs"]["layers"] = "999a" * 200
    status = {"model": known}

    assert stored_model(status) is None
    assert [each["kind"] for each in look(stored=status).wanted] == ["ServiceAccount", "Job"]


@pytest.mark.parametrize("wrong", [{"pods": 0}, {"pods": 3}, {"tensor": 0}, {"pipeline": HUGE}, {"tensor": HUGE}])
def test_a_stored_shape_that_cannot_be_made_is_computed_again(wrong):
    right = {"tensor": 1, "pipeline": 2, "pods": 2, "nodes": 2, "weightsBytesPerRank": 1, "inputs": "00000000"}

    assert stored_sizing({"sizing": right}) is not None
    assert stored_sizing({"sizing": right | wrong}) is None


def test_kinds_of_stages_are_those_of_the_whole_split():
    for num_layers, head in itertools.product((1, 2, 3, 7, 48, 97), (0.0, 0.4, 1.0, 2.5, 40.0, 1e9)):
        for num_stages in range(1, num_layers + 1):
            split = split_layers(num_layers, num_stages, head)
            kinds = stages(num_layers, num_stages, head)
            if num_stages == 1:
                assert (kinds.only, split) == (num_layers, (num_layers,))
                continue
            assert (kinds.first, kinds.last, sum(split)) == (split[0], split[-1], num_layers)
            assert {kinds.longer, kinds.shorter} - {0} == set(split[1:-1])


def test_a_split_is_the_best_of_all():
    """The split is compared with every number of layers that the last stage could have."""
    for num_layers, head in itertools.product((2, 7, 48, 97), (0.0, 0.4, 1.0, 2.5, 40.0, 1e9)):
        for num_stages in range(2, num_layers + 1):

            def slowest(last, num_layers=num_layers, num_stages=num_stages, head=head):
                return max(-(-(num_layers - last) // (num_stages - 1)), last + head)

            best = min(range(num_layers // num_stages, 0, -1), key=slowest)
            assert split_layers(num_layers, num_stages, head)[-1] == best, (num_layers, num_stages, head)


def worst_costs():
    """Costs with the largest numbers of layers, kinds of layers and ranks. Their weights fit nowhere, or anywhere."""
    many = tuple(sorted({n for n in range(1, 2521) if 2520 % n == 0} | {4096}))
    for layers, num_kinds in (("1000a", 1), ("ab" * 500, 2), ("".join(map(chr, range(97, 123))) * 38, 26)):
        for weights, kv in ((1, 1), (1 << 30, 1), (1 << 34, 1 << 30), (0, 0)):
            for head_layers in (0.5, 1e15):
                yield make_costs(
                    tensor=many,
                    layers=layers,
                    weights=[weights + kind for kind in range(num_kinds)],
                    kv=[kv * (kind + 1) for kind in range(num_kinds)],
                    windows=[kind + 1 for kind in range(num_kinds)],
                    embedding=1 << 40,
                    head_layers=head_layers,
                )


def num_calls(function, *args):
    """Returns the number of called functions, including functions in C. This number is the same on every machine."""
    number = 0

    def count(frame, event, argument):
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return number


def sized(question):
    with contextlib.suppress(SpecError):
        sizing = size(question)
        # Numbers in a status have 64 bits.
        assert max(sizing.weights_bytes_per_rank, sizing.kv_tokens, sizing.concurrent_requests) < 1 << 63


def test_all_costs_within_the_bounds_are_sized_with_60_calls_per_layer():
    # 1,000 layers with 60,000 calls take 8 to 18 ms on a core of an AMD EPYC of 2022.
    most = 0
    for each, per_node, gib, tensor in itertools.product(worst_costs(), (64, None), (1, 20, 10**6), (None, 1)):
        facts = SMOLLM2.model_copy(update={"costs": each})
        most = max(most, num_calls(sized, make_question(facts, gib, per_node, dtype="float32", tensor=tensor)))
    assert 20_000 < most < 60_000
