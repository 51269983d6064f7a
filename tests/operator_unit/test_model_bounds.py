"""A model's sizes are somebody else's words: none of them stops the operator, wherever it reads them.

The slow ones took for ever, or seconds, in the event loop that all tenants share.
"""

import contextlib
import itertools
import json
import time

import pytest

from rayloom_operator.api.model_facts import ModelShape
from rayloom_operator.api.status import Reason, stored_model, stored_sizing
from rayloom_operator.errors import SpecError
from rayloom_operator.resolve.rank_memory import split_layers, stages
from rayloom_operator.resolve.sizing import Question, size
from rt_inspection import COMMIT, HUB_MODEL, SHAPE, ended, facts, look
from rt_shapes import SMOLLM2

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
        ({"hidden_size": 1 << 22, "num_layers": 1000, "intermediate_size": 1 << 22}, "parameters"),
        ({"checkpoint_dtype": "int3"}, "shape.checkpoint_dtype: 'int3' is not a type of weights"),
        ({"architecture": "x" * 257}, "shape.architecture"),
    ],
)
def test_sizes_beyond_every_model_are_refused_with_their_name(sizes, words):
    seen = look(ended(said_with(**sizes)))

    assert (seen.facts, seen.verdict.reason) == (None, Reason.MODEL_UNSUPPORTED)
    assert words in seen.verdict.message


@pytest.mark.parametrize(
    "words",
    [
        "[" * 4000,
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
def test_words_of_any_form_are_a_condition(words):
    seen = look(ended(words, code=1))

    assert seen.facts is None
    assert seen.verdict.reason in (Reason.INSPECTION_FAILED, Reason.MODEL_UNSUPPORTED)
    assert len(seen.verdict.message) < 1000


def test_a_long_message_of_a_job_is_cut():
    words = json.dumps({"version": "v1", "error": {"reason": "NotFound", "message": "x" * 4000}})

    assert len(look(ended(words, code=78)).verdict.message) < 1000


def test_a_status_that_nobody_could_have_found_is_looked_up_again():
    shape = {"numHeads": HUGE, "numKvHeads": HUGE, "vocabSize": HUGE, "intermediateSize": HUGE}
    known = SMOLLM2.model_dump(by_alias=True) | shape
    status = {"model": {"source": HUB_MODEL["source"], "numParameters": 1, "commit": COMMIT, "shape": known}}

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
    """Held to every number of layers that the last stage could have."""
    for num_layers, head in itertools.product((2, 7, 48, 97), (0.0, 0.4, 1.0, 2.5, 40.0, 1e9)):
        for num_stages in range(2, num_layers + 1):

            def slowest(last, num_layers=num_layers, num_stages=num_stages, head=head):
                return max(-(-(num_layers - last) // (num_stages - 1)), last + head)

            best = min(range(num_layers // num_stages, 0, -1), key=slowest)
            assert split_layers(num_layers, num_stages, head)[-1] == best, (num_layers, num_stages, head)


def worst_shapes():
    """The most layers, heads with the most divisors, and what of a model makes it not fit."""
    for num_layers, heads in itertools.product((1000, 997), ((4096, 4096), (3360, 3360), (2520, 1))):
        for hidden, feed_forward, vocabulary, head_dim in (
            (1 << 22, 1, 1, 1),
            (1 << 14, 1 << 14, 1 << 24, 1),
            (4096, 4096, 50_000, 16),
            (1, 1 << 22, 1 << 24, 1),
        ):
            sizes = dict(zip(("num_heads", "num_kv_heads"), heads, strict=True))
            sizes |= {"num_layers": num_layers, "hidden_size": hidden, "intermediate_size": feed_forward}
            sizes |= {"vocab_size": vocabulary, "head_dim": head_dim, "max_position_embeddings": 1 << 30}
            rest = {"tie_word_embeddings": False, "checkpoint_dtype": "float32", "architecture": "a"}
            try:
                yield ModelShape(**sizes, **rest)
            except ValueError:
                continue  # too many parameters altogether


def test_every_shape_within_the_bounds_is_sized_within_10_ms():
    slowest = 0.0
    shapes = list(worst_shapes())
    assert len(shapes) > 10
    for shape, per_node, gib, tensor in itertools.product(shapes, (64, None), (1, 20, 10**6), (None, 1)):
        question = Question(
            shape=shape,
            dtype="float32",
            per_node=per_node,
            memory=gib << 30,
            tensor=tensor,
            pipeline=None,
            max_model_len=None,
            num_requests=1,
        )
        seconds = []
        # CPU time, and the best of several: it is about the work, not about who else works here.
        for _ in range(3):
            began = time.thread_time()
            with contextlib.suppress(SpecError):
                size(question)
            seconds.append(time.thread_time() - began)
        slowest = max(slowest, min(seconds))
    print(f"slowest sizing: {slowest * 1000:.1f} ms")
    assert slowest < 0.01
