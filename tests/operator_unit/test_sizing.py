"""The choice of parallelism for a model, and the bytes behind it.

Figures follow from config.json and are checked by hand.
"""

import pytest

from rayloom_operator.errors import DoesNotFit, SpecError
from rayloom_operator.resolve.load import Scale
from rayloom_operator.resolve.rank_memory import step_bytes
from rayloom_operator.resolve.sizing import candidates, places, size
from rayloom_operator.resolve.stage_split import split_layers
from rt_shapes import GIB, LLAMA3_8B, LLAMA3_70B, LLAMA31_8B, LLAMA31_70B, MODELS, QWEN3_32B, SMOLLM2, make_question

# The same model, as if stages could not share its layers.
UNDIVIDED = SMOLLM2.model_copy(update={"costs": SMOLLM2.costs.model_copy(update={"most_stages": 1})})


def shape_of(*args, **changes):
    return size(make_question(*args, **changes)).shape


def refusal(kind, *args, **changes):
    with pytest.raises(kind) as caught:
        size(make_question(*args, **changes))
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("model", "gib", "winners"),
    [
        # Weights in bfloat16: 15.0 GiB, 131.4 GiB, 61.0 GiB, 0.25 GiB.
        ("Llama-3-8B", 24, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
        ("Llama-3-8B", 40, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
        ("Llama-3-8B", 80, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
        ("Llama-3-8B", 141, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
        # 6 x (24 - 1.5) GiB are 135 GiB, more than the weights. But with 6 stages, a stage has 14 layers, which take
        # 22.3 of its 22.5 GiB.
        ("Llama-3-70B", 24, ("TP1xPP7", "TP2xPP4", "TP4xPP2", "TP8xPP1")),
        ("Llama-3-70B", 40, ("TP1xPP4", "TP2xPP2", "TP4xPP1", "TP4xPP1")),
        ("Llama-3-70B", 80, ("TP1xPP2", "TP2xPP1", "TP2xPP1", "TP2xPP1")),
        # 141 GiB less 1 GiB, 131.4 GiB of weights and 1.8 GiB for a step are 6.8 GiB. 8192 tokens need 2.5 GiB.
        ("Llama-3-70B", 141, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
        # 3 x (24 - 1.5) GiB less 61 GiB of weights are 6.5 GiB. 40960 tokens need 10 GiB, so 3 stages are too few.
        ("Qwen3-32B", 24, ("TP1xPP4", "TP2xPP2", "TP4xPP1", "TP4xPP1")),
        ("Qwen3-32B", 40, ("TP1xPP2", "TP2xPP1", "TP2xPP1", "TP2xPP1")),
        ("Qwen3-32B", 80, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
        ("Qwen3-32B", 141, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
        ("SmolLM2", 24, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
        ("SmolLM2", 40, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
        ("SmolLM2", 80, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
        ("SmolLM2", 141, ("TP1xPP1", "TP1xPP1", "TP1xPP1", "TP1xPP1")),
    ],
)
def test_the_cheapest_that_fits_on_1_2_4_and_8_accelerators_of_a_node(model, gib, winners):
    # The chosen shapes have room for the model's whole context: 8192 tokens, and 40960 tokens for Qwen3.
    assert tuple(shape_of(MODELS[model], gib, per_node) for per_node in (1, 2, 4, 8)) == winners


@pytest.mark.parametrize(
    ("shape", "tensor", "pipeline", "num_bytes"),
    [
        # A layer: 4096 x (4096 + 2 x 1024) + 4096 x 4096 + 3 x 4096 x 14336 + 2 x 4096 = 218,112,000 parameters. 32
        # layers, 2 x 128256 x 4096 and 4096 are 8,030,261,248 parameters, of 2 bytes each.
        (LLAMA3_8B, 1, 1, 16_060_522_496),
        # A layer: 855,654,400. 80 layers, 2 x 128256 x 8192 and 8192 are 70,553,706,496.
        (LLAMA3_70B, 1, 1, 141_107_412_992),
        # A rank's part of a layer: 8192 x (1024 + 2 x 128) + 8192 x 1024 + 3 x 8192 x 3584 + 2 x 8192 (both norms are
        # whole) = 106,971,136. 80 such parts, 2 x 16032 x 8192 and 8192 are 8,820,367,360.
        (LLAMA3_70B, 8, 1, 17_640_734_720),
        # 40 such parts, and either the embedding or the head. The head's rank also has the final norm: 4,410,187,776.
        (LLAMA3_70B, 8, 2, 8_820_375_552),
        # A layer: 5120 x (8192 + 2 x 1024) + 8192 x 5120 + 3 x 5120 x 25600 + 2 x 5120 + 2 x 128 = 487,598,336. 64
        # layers, 2 x 151936 x 5120 and 5120 are 32,762,123,264.
        (QWEN3_32B, 1, 1, 65_524_246_528),
        # Embedding and head are the same matrix, which counts once: 134,515,008.
        (SMOLLM2, 1, 1, 269_030_016),
        # Both stages have the embedding. A layer: 576 x (576 + 2 x 192) + 576 x 576 + 3 x 576 x 1536 + 2 x 576 =
        # 3,540,096. The head costs as much as 4 layers, so the stages have 17 and 13 layers. The first stage has 17 x
        # 3,540,096 + 49152 x 576 = 88,493,184 parameters.
        (SMOLLM2, 1, 2, 176_986_368),
    ],
)
def test_weights_of_the_largest_rank(shape, tensor, pipeline, num_bytes):
    assert Scale(make_question(shape), tensor).load(pipeline).weights == num_bytes


def test_kv_tokens_of_an_8b_model_on_24_gib():
    # 24 - 1 GiB less 16,060,522,496 bytes of weights are 8,635,539,456. A step takes 8192 x (3 x 4096 + 3 x 14336) x 2
    # + 3 x 64 x 128256 x 4 = 1,004,470,272 bytes. This is more than a tenth, so 7,631,069,184 bytes are left. A token
    # takes 2 x 32 x 1024 x 2 = 131,072 bytes, and a block takes 16 times as many. So there are 3638 blocks.
    found = size(make_question(LLAMA3_8B, 24, 1))

    assert step_bytes(LLAMA3_8B.costs, 1, element_bytes=2, num_tokens=8192, num_seqs=64) == 1_004_470_272
    assert (found.kv_tokens, found.max_model_len, found.concurrent_requests) == (3638 * 16, 8192, 7)


def test_kv_tokens_where_a_tenth_of_the_free_memory_is_enough_for_a_step():
    # 80 - 1 GiB less the weights are 68,765,081,600 bytes. Nine tenths of these bytes hold 29,510 blocks of 2 MiB.
    assert size(make_question(LLAMA3_8B, 80, 1)).kv_tokens == 29_510 * 16


def test_two_nodes_for_sixteen_long_conversations():
    # 80 - 1.5 GiB less 8,820,375,552 are 75,468,357,632 bytes. A rank has 40 layers and one of 8 key/value heads, so a
    # block has 16 x 2 x 40 x 128 x 2 = 327,680 bytes. Nine tenths hold 207,280 blocks.
    found = size(make_question(LLAMA31_70B, num_requests=16, max_model_len=131_072))

    assert (found.shape, found.pods, found.nodes) == ("TP8xPP2", 2, 2)
    assert (found.kv_tokens, found.max_model_len, found.concurrent_requests) == (207_280 * 16, 131_072, 25)
    assert [(each.shape, each.fits) for each in found.alternatives] == [
        ("TP1xPP1", False),
        ("TP2xPP1", False),
        ("TP4xPP1", False),
        ("TP8xPP1", False),
    ]
    assert "16 x 131072 tokens need 80.0 GiB" in found.alternatives[3].why_not


def test_a_context_that_the_spec_leaves_out_is_cut_to_fit():
    # 3638 blocks fit, as above. The context leaves a sixteenth of them unused: 3638 x 15 / 16 = 3410 blocks.
    found = size(make_question(LLAMA31_8B, 24, 1))

    assert (found.shape, found.max_model_len, found.concurrent_requests) == ("TP1xPP1", 3410 * 16, 1)
    assert shape_of(LLAMA31_8B, 24, 1, max_model_len=131_072) == "TP1xPP2"


def test_the_engine_takes_no_more_blocks_than_its_sequences_can_use():
    # 64 sequences of 8192 tokens.
    assert size(make_question(SMOLLM2, 24, 1)).kv_tokens == 64 * 8192
    assert size(make_question(SMOLLM2, 24, 1, max_num_seqs=2)).concurrent_requests == 2


def test_on_a_cpu_the_cap_of_the_engine_decides():
    # The cap is 4 GiB. A token takes 2 x 30 x 192 x 2 = 23,040 bytes, and a block takes 368,640.
    found = size(make_question(SMOLLM2, None, None, tensor=1, pipeline=1))

    assert (found.kv_tokens, found.pods, found.alternatives) == (11_650 * 16, 1, ())
    # The ranks of a stage share the heads and the memory: each has a third of 4 GiB, in blocks of a third of the size.
    assert size(make_question(SMOLLM2, None, None, tensor=3, pipeline=1)).kv_tokens == 11_650 * 16


def test_on_a_cpu_the_cache_takes_half_of_the_memory_limits_rest():
    # 2048 - 384 - 168 MiB less 96,506,496 bytes of weights are 1,472,163,200 bytes. Half of these bytes hold 1996
    # blocks.
    assert size(make_question(SMOLLM2, 2, None, tensor=1, pipeline=1)).kv_tokens == 1996 * 16


def test_on_a_cpu_copies_of_kv_blocks_leave_less_memory_for_the_cache():
    # 368,640,000 bytes for 1000 copies leave half as much less for the cache: 500 blocks less than above.
    asked = make_question(SMOLLM2, 2, None, tensor=1, pipeline=1, kv_host_memory_bytes=1000 * 368_640)
    assert size(asked).kv_tokens == (1996 - 500) * 16
    assert asked.inputs != make_question(SMOLLM2, 2, None, tensor=1, pipeline=1).inputs
    refused = make_question(SMOLLM2, 2, None, tensor=1, pipeline=1, kv_host_memory_bytes=2 << 30)
    sentence = (
        r"92 MiB of weights, 2\.0 GiB for copies of KV blocks and 552 MiB for the process do not fit in 2\.0 GiB; "
        r"raise spec\.engine\.resources\.limits\.memory, or lower spec\.engine\.args\.kvHostMemoryBytes"
    )
    with pytest.raises(DoesNotFit, match=sentence):
        size(refused)


@pytest.mark.parametrize("quantization", ["none", "int8", "dense"])
def test_quantised_weights_count_as_dense_where_no_rank_keeps_them(quantization):
    # 1,299,639,680 bytes are left beside 269,030,016 bytes of weights.
    asked = make_question(SMOLLM2, 2, None, tensor=1, pipeline=1, quantization=quantization)
    assert size(asked).kv_tokens == 1762 * 16
    kept = make_question(SMOLLM2, 2, None, tensor=1, pipeline=1)
    assert size(kept).kv_tokens == 1996 * 16
    assert (asked.inputs == kept.inputs) is (quantization != "none")


@pytest.mark.parametrize(
    ("per_node", "tensor", "pipeline", "pods_and_nodes"),
    [
        (8, 8, 2, (2, 2)),  # one stage per node
        (8, 2, 4, (1, 1)),  # four stages in a pod
        (4, 2, 6, (3, 3)),  # two stages in a pod
        (4, 2, 3, (3, 2)),  # the number of stages is odd, so a pod has one stage; a node has room for two pods
        (None, 3, 2, (2, 2)),  # CPU: one stage per pod
    ],
)
def test_stages_share_a_pod_as_far_as_a_node_goes(per_node, tensor, pipeline, pods_and_nodes):
    assert places(per_node, tensor, pipeline) == pods_and_nodes


def test_layers_are_even_but_for_the_last_stage_with_a_heavy_head():
    assert split_layers(80, 2, 0.6) == (40, 40)
    assert split_layers(30, 2, 4.0) == (17, 13)
    assert split_layers(32, 3, 0.5) == (11, 11, 10)


def test_the_number_that_is_given_stays_and_the_other_is_computed():
    assert shape_of(LLAMA3_70B, 40, tensor=2) == "TP2xPP2"
    assert shape_of(LLAMA3_70B, 40, pipeline=2) == "TP2xPP2"
    assert shape_of(LLAMA3_70B, 80, tensor=8, pipeline=2) == "TP8xPP2"


def test_more_accelerators_than_needed_are_served_better_by_replicas():
    found = size(make_question(LLAMA3_70B, 80, tensor=8, pipeline=2))

    assert found.advice.startswith("8 replicas of TP2xPP1 take no more accelerators than one of TP8xPP2")
    assert size(make_question(LLAMA3_70B, 80)).advice == ""


def test_only_one_stage_is_considered_for_layers_that_stages_cannot_share():
    assert {way.pipeline for way in candidates(make_question(UNDIVIDED, 1), {})} == {1}


@pytest.mark.parametrize(
    ("kind", "arguments", "changes", "sentence"),
    [
        (
            SpecError,
            (SMOLLM2,),
            {"tensor": 2},
            "spec.parallelism.tensor: 2 ranks cannot share a layer of LlamaForCausalLM; use one of 1, 3, 9, and for "
            "more ranks spec.parallelism.pipeline",
        ),
        (
            SpecError,
            (SMOLLM2,),
            {"pipeline": 31},
            "spec.parallelism.pipeline: 31 stages cannot share the model's 30 layers; use 1 to 30",
        ),
        (
            SpecError,
            (UNDIVIDED,),
            {"pipeline": 2},
            "spec.parallelism.pipeline: 2 stages cannot share the model's 30 layers, because a layer reads more than "
            "the output of the layer before it; use 1",
        ),
        (
            SpecError,
            (SMOLLM2,),
            {"max_model_len": 8193},
            "spec.model.maxModelLen: 8193 is more than the model's 8192 positions; lower it",
        ),
        (
            SpecError,
            (SMOLLM2,),
            {"num_requests": 65},
            "spec.sizing.minConcurrentRequests: the engine computes 64 sequences at once; raise "
            "spec.engine.args.maxNumSeqs to 65 or more, or lower it",
        ),
        (
            DoesNotFit,
            (LLAMA3_70B, 80),
            {"tensor": 1, "pipeline": 1},
            "spec.parallelism: TP1xPP1 does not fit: 131.4 GiB of weights and 1.0 GiB for the process do not fit in "
            "80.0 GiB; use tensor 2 and pipeline 1, which fit",
        ),
        (
            DoesNotFit,
            (LLAMA31_70B, 80),
            {"tensor": 2, "pipeline": 1, "max_model_len": 131072},
            "spec.parallelism: TP2xPP1 does not fit: 1 x 131072 tokens need 20.0 GiB of KV cache on a rank, and "
            "there is room for 11.5 GiB; use tensor 4 and pipeline 1, which fit",
        ),
        (
            DoesNotFit,
            (LLAMA3_70B, 2, 1),
            {},
            "spec.parallelism: even TP1xPP80 does not fit: 3.6 GiB of weights and 1.5 GiB for the "
            "process do not fit in 2.0 GiB; lower spec.model.maxModelLen, or use accelerators with more memory or more "
            "of them on a node",
        ),
        (
            DoesNotFit,
            (LLAMA3_8B, 4, None),
            {"tensor": 1, "pipeline": 1},
            "spec.parallelism: TP1xPP1 does not fit: 15.0 GiB of weights and 552 MiB for the process do not fit in "
            "4.0 GiB; use tensor 1 and pipeline 5, which fit",
        ),
        (
            DoesNotFit,
            (LLAMA3_8B, 24, 1),
            {"num_kv_blocks": 4000, "pipeline": 1},
            "spec.parallelism: TP1xPP1 does not fit: 4000 KV blocks need 7.8 GiB on a rank, and there is room for "
            "7.1 GiB; use tensor 1 and pipeline 2, which fit",
        ),
    ],
)
def test_an_impossible_number_is_refused_with_the_possible_ones(kind, arguments, changes, sentence):
    assert refusal(kind, *arguments, **changes) == sentence


def test_blocks_that_the_user_gives_are_the_ones_that_count():
    given = {"tensor": 1, "pipeline": 1}

    assert size(make_question(LLAMA3_8B, 24, 1, num_kv_blocks=1000, **given)).kv_tokens == 16_000
    # 1 GiB holds 512 blocks of 2 MiB.
    assert size(make_question(LLAMA3_8B, 24, 1, kv_cache_memory_bytes=GIB, **given)).kv_tokens == 512 * 16
    # The stages have 17 and 13 layers. A block of 17 layers takes 16 x 2 x 17 x 192 x 2 = 208,896 bytes.
    found = size(make_question(SMOLLM2, 24, 1, kv_cache_memory_bytes=GIB, tensor=1, pipeline=2))
    assert found.kv_tokens == 5140 * 16


def test_the_question_has_the_same_hash_for_ever_and_every_part_counts():
    # With another value, an upgrade of the operator would roll services.
    base = make_question(LLAMA3_8B)

    assert base.inputs == "27c27150"
    changes = {"gib": 40, "per_node": 4, "tensor": 1, "pipeline": 1, "max_model_len": 4096, "num_requests": 2}
    changes |= {"dtype": "float16", "max_num_seqs": 64, "num_step_tokens": 8192, "num_kv_blocks": 64}
    hashes = {make_question(LLAMA3_8B, **{name: value}).inputs for name, value in changes.items()}
    assert len(hashes | {base.inputs, make_question(QWEN3_32B).inputs}) == len(changes) + 2


def test_candidates_are_stages_of_every_width_and_several_of_the_widest():
    found = candidates(make_question(LLAMA31_70B, 40, 4, num_requests=8, max_model_len=131_072), {})

    assert [each.shape for each in found] == ["TP1xPP1", "TP2xPP1", "TP4xPP1", *(f"TP4xPP{n}" for n in (2, 3, 4))]
    assert [each.fits for each in found] == [False] * 5 + [True]
