"""The memory of a draft model in the sizing, the status and the worker pods.

The comparison with the engine's bytes is in tests/contract/test_draft_model.py.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_operator.api.sizing_status import stored_sizing
from rayloom_operator.api.status import Status
from rayloom_operator.errors import DoesNotFit, SpecError
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.rank_memory import Cut, DraftRoom, RankMemory, drafting_step_bytes
from rayloom_operator.resolve.resolved import question, resolve
from rayloom_operator.resolve.sizing import size
from rayloom_operator.resolve.stage_split import stages
from rt_operator import make_resolved, make_service
from rt_shapes import GIB, LLAMA31_8B, LLAMA31_70B, SHIPPED, SMOLLM2, make_costs, make_question

MIB = 1 << 20
SOURCE = "builtin://smollm2-135m"
OWN = {"source": SOURCE, "draft": {"source": SOURCE}}
# The built-in model in the types of its file, and in bfloat16.
KEPT, DENSE = 96_506_496, 2 * 134_515_008
# 2 x 30 layers x 3 heads x 64 numbers of 2 bytes, for 16 tokens.
KV_BLOCK = 368_640


def room_of(facts, element_bytes=2, num_drafted=7):
    costs = facts.as_draft().costs
    return DraftRoom(
        weights=costs.weights.bytes_at(0, element_bytes),
        kv_block=16 * costs.kv.bytes_at(0, element_bytes),
        token_bytes=costs.step.token.bytes_at(0, element_bytes),
        sequence_bytes=costs.step.sequence_bytes,
        num_drafted=num_drafted,
    )


def asked(**model):
    return question(make_service(model={**OWN, **model}), with_draft(SMOLLM2))


def with_draft(facts, draft=SMOLLM2):
    return facts.model_copy(update={"draft": draft.as_draft()})


def test_only_the_rank_that_samples_holds_the_draft_model():
    draft = DraftRoom(weights=300, kv_block=160, token_bytes=1, sequence_bytes=1, num_drafted=7)
    cut = Cut(make_costs(head_layers=0.0), 1, 2, draft=draft)
    # Four layers of 1000 numbers, and 64 numbers of KV of a token in each. Embedding 500, head 600, both 1000.
    first = RankMemory(weights=9000, kv_block=8192)
    last = RankMemory(weights=9200, kv_block=8192 + 160, draft=300)

    assert cut.ranks(stages(8, 2, 0.0)) == {first, last}
    assert cut.ranks(stages(8, 1, 0.0)) == {RankMemory(weights=18_000, kv_block=16_384 + 160, draft=300)}


def test_a_draft_model_computes_beside_the_hidden_states_and_logits_of_the_model():
    draft = DraftRoom(weights=0, kv_block=0, token_bytes=10, sequence_bytes=100, num_drafted=7)
    row = {"hidden_size": 3, "vocab_size": 5}

    # 4 bytes x (20 tokens x 3 + 2 rows x (3 + 5)) are held; the draft model's step needs 20 x 10 + 2 x 100.
    assert drafting_step_bytes(399, draft, num_tokens=20, num_rows=2, **row) == 400 + 304
    assert drafting_step_bytes(401, draft, num_tokens=20, num_rows=2, **row) == 401 + 304


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ({}, KEPT),
        ({"dtype": "bfloat16"}, DENSE),
        ({"dtype": "float32"}, 2 * DENSE),
        ({"draft": {"source": SOURCE, "quantization": "none"}}, DENSE),
        ({"draft": {"source": SOURCE, "quantization": "int8"}}, DENSE),  # while they are loaded
    ],
    ids=str,
)
def test_the_weights_are_counted_in_the_form_that_the_draft_model_has(model, weights):
    assert asked(**model).draft.weights == weights


def test_the_draft_model_has_the_type_of_its_own_checkpoint():
    float32 = SMOLLM2.shape.model_copy(update={"checkpoint_dtype": "float32"})
    facts = with_draft(SMOLLM2, SMOLLM2.model_copy(update={"shape": float32, "quantization": None}))
    draft = question(make_service(model={**OWN, "draft": {"source": SOURCE, "quantization": "none"}}), facts).draft

    assert (draft.weights, draft.kv_block) == (2 * DENSE, 2 * KV_BLOCK)


def test_the_kv_cache_has_room_for_the_keys_and_values_of_both_models():
    # 2048 - 384 - 168 MiB less 2 x 96,506,496 bytes of weights are 1,375,656,704 bytes. Half of these bytes hold 932
    # blocks of 2 x 368,640 bytes.
    limited = {"engine": {"resources": {"limits": {"memory": "2Gi"}}}}
    found = make_resolved(model=OWN, **limited).sizing

    assert (found.kv_tokens, found.weights_bytes_per_rank, found.draft_weights_bytes) == (932 * 16, KEPT, KEPT)
    assert make_resolved(**limited).sizing.kv_tokens == 1996 * 16
    assert make_resolved(**limited).sizing.draft_weights_bytes is None


def test_given_bytes_of_the_kv_cache_are_for_both_models():
    cache = {"engine": {"args": {"kvCacheMemoryBytes": 100 * 2 * KV_BLOCK}}}

    assert make_resolved(model=OWN, **cache).sizing.kv_tokens == 100 * 16
    assert make_resolved(**cache).sizing.kv_tokens == 200 * 16


def on_cpu(mebibytes, **spec):
    engine = {"resources": {"limits": {"memory": f"{mebibytes}Mi"}}, "args": spec.pop("args", {})}
    return make_resolved(model=OWN, engine=engine, **spec).sizing


def test_the_step_of_both_models_stays_free():
    # Of 840 MiB, 108,976,896 bytes are free beside 552 MiB for processes and 193,012,992 bytes of weights. The step of
    # a model needs 512 x (3 x 576 + 3 x 1536) x 2 + 64 x 3 x 49152 x 4 bytes, and 4 x (512 x 576 + 64 x (576 + 49152))
    # bytes are held, together 58,146,816. The other 50,830,080 bytes hold 68 blocks; half of the free bytes holds 73.
    assert on_cpu(840).kv_tokens == 68 * 16
    # With 4 sequences, the 8 rows of a draft are the most: 13,977,600 of 25,090,816 bytes stay free, for 15 blocks.
    assert on_cpu(760, args={"maxNumSeqs": 4}).kv_tokens == 15 * 16
    with pytest.raises(DoesNotFit, match="there is room for 0 MiB"):
        on_cpu(738)


def test_the_ranks_of_a_pod_share_the_memory_that_the_draft_model_leaves():
    # Each of three ranks has 560 MiB, less 440 MiB for processes, 32,215,680 bytes of weights and 32,168,832 bytes of
    # the draft model's: 61,444,608. Without the step, 3,297,792 bytes are left, for blocks of 122,880 + 368,640 bytes.
    assert on_cpu(1680, parallelism={"tensor": 3}).kv_tokens == 6 * 16


def test_the_status_shows_the_bytes_of_the_draft_model():
    found = make_resolved(model=OWN).sizing
    document = json.loads(Status(sizing=found).model_dump_json(by_alias=True, exclude_none=True))

    assert document["sizing"]["draftWeightsBytes"] == KEPT
    assert stored_sizing(document) == found


def requested(resolved):
    """The memory that a worker pod requests."""
    (workers,) = ray_cluster(resolved, "abcd")["spec"]["workerGroupSpecs"]
    return workers["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"]


def test_a_worker_pod_requests_the_memory_of_the_draft_model_once():
    # Each copy of the model has 538,060,032 bytes or 513.1 MiB, and 384 + 168 MiB are for processes.
    assert requested(make_resolved(model={"source": SOURCE, "dtype": "float32"})) == "1066Mi"
    assert requested(make_resolved(model={**OWN, "dtype": "float32"})) == "1579Mi"
    # 3 ranks with 128 adapters request 3726.7 MiB (test_adapter_sizing.py), and 96,506,496 bytes are 92.0 MiB.
    several = {"parallelism": {"tensor": 3}, "engine": {"args": {"maxLoras": 128}}}
    adapters = [{"name": "sql", "source": "pvc://adapters/sql"}]
    assert requested(make_resolved(model={"source": SOURCE, "adapters": adapters}, **several)) == "3727Mi"
    assert requested(make_resolved(model={**OWN, "adapters": adapters}, **several)) == "3819Mi"


def test_a_pod_requests_disk_space_for_a_draft_model_that_it_downloads_or_converts():
    def disk(source, **model):
        service = make_service(model={"source": SOURCE, "draft": {"source": source}, **model})
        (workers,) = ray_cluster(resolve(service, "i", with_draft(SMOLLM2)), "abcd")["spec"]["workerGroupSpecs"]
        return workers["template"]["spec"]["containers"][0]["resources"]["requests"].get("ephemeral-storage")

    # 269,030,016 bytes and a twentieth are 269.4 MiB; 1 GiB is for other files.
    assert disk("hf://acme/draft") == disk("pvc://claim/d.gguf") == "1294Mi"
    assert disk("hf://acme/draft", cache={"persistentVolumeClaim": "c"}) is None
    assert disk("pvc://claim/d") is None


def test_a_gpu_holds_the_model_and_the_draft_model_or_the_model_gets_more_gpus():
    # 8,030,261,248 parameters of 2 bytes take 15.0 GiB, and the process takes 1 GiB. In 24 GiB there is room for a
    # request of 8,192 tokens beside one such model, but not beside two. Of four ranks, the one that samples has about a
    # quarter of the model.
    gpu = {"gib": 24, "per_node": 2, "max_model_len": 8192}

    assert size(make_question(LLAMA31_8B, **gpu)).shape == "TP1xPP1"
    found = size(make_question(LLAMA31_8B, **gpu, draft=room_of(SMOLLM2)))
    assert (found.shape, found.draft_weights_bytes) == ("TP1xPP1", DENSE)
    assert size(make_question(LLAMA31_8B, **gpu, draft=room_of(LLAMA31_8B))).shape == "TP2xPP2"
    with pytest.raises(DoesNotFit) as refused:
        size(make_question(LLAMA31_8B, **gpu, tensor=1, pipeline=1, draft=room_of(LLAMA31_8B)))
    assert str(refused.value) == (
        "spec.parallelism: TP1xPP1 does not fit: 15.0 GiB of weights, 15.0 GiB of the draft model's weights and 1.0 "
        "GiB for the process do not fit in 24.0 GiB; use tensor 2 and pipeline 2, which fit, or use a smaller model in "
        "spec.model.draft, or none"
    )
    assert size(make_question(LLAMA31_70B)).shape == "TP2xPP1"
    assert size(make_question(LLAMA31_70B, draft=room_of(LLAMA31_8B))).shape == "TP4xPP1"


def test_a_step_has_at_least_the_rows_of_one_draft():
    gpu = {"gib": 24, "per_node": 1, "max_model_len": 32_768, "draft": room_of(SMOLLM2, num_drafted=7)}
    four, eight, most = (size(make_question(LLAMA31_8B, max_num_seqs=n, **gpu)).kv_tokens for n in (4, 8, 64))

    assert four == eight > most


def test_a_draft_model_too_large_for_a_pod_is_refused_with_the_fields_to_change():
    with pytest.raises(DoesNotFit) as refused:
        make_resolved(model=OWN, engine={"resources": {"limits": {"memory": "700Mi"}}})
    assert str(refused.value) == (
        "spec.parallelism: TP1xPP1 does not fit: 92 MiB of weights, 92 MiB of the draft model's weights and 552 MiB "
        "for the process do not fit in 700 MiB; raise spec.engine.resources.limits.memory, or use a smaller model in "
        "spec.model.draft, or none"
    )


def test_a_part_of_a_draft_model_that_does_not_fit_is_shown_beside_the_whole():
    with pytest.raises(DoesNotFit) as refused:
        on_cpu(1200, parallelism={"tensor": 3})
    # 96,506,496 bytes are 92 MiB, and a third of them is 31 MiB. 384 and 168 / 3 MiB are for a rank's process.
    assert "31 MiB as its part of the 92 MiB of the draft model's weights and 440 MiB for the" in str(refused.value)


def test_another_draft_model_is_another_question_and_other_costs_of_it_are_not():
    plain = question(make_service(model={"source": SOURCE}), SMOLLM2)
    own = asked()
    costs = own.draft
    hashes = {
        plain.inputs,
        own.inputs,
        asked(draft={"source": SOURCE, "quantization": "none"}).inputs,
        asked(draft={"source": SOURCE, "quantization": "int8"}).inputs,
        asked(draft={"source": "hf://acme/draft"}).inputs,
        asked(draft={"source": "hf://acme/draft", "revision": "v2"}).inputs,
    }

    assert len(hashes) == 6
    assert asked(draft={"source": SOURCE, "quantization": "auto"}).inputs == own.inputs
    assert replace(own, draft=replace(costs, weights=costs.weights + 1)).inputs == own.inputs
    assert question(make_service(model={"source": SOURCE}), with_draft(SMOLLM2)).inputs == plain.inputs


def test_a_draft_model_in_another_form_is_sized_again():
    def sized_as(quantization, previous):
        draft = {"source": SOURCE, "quantization": quantization}
        return resolve(make_service(model={**OWN, "draft": draft}), "i", with_draft(SMOLLM2), previous).sizing

    kept = sized_as("auto", {})
    previous = json.loads(Status(sizing=kept).model_dump_json(by_alias=True, exclude_none=True))

    assert sized_as("auto", previous) == kept
    assert [sized_as(form, previous).draft_weights_bytes for form in ("int8", "none")] == [DENSE, DENSE]


NATIVE = sorted(name for name, facts in SHIPPED.items() if facts.as_draft() is not None)


def sized(asking):
    try:
        return size(asking)
    except SpecError:
        return None


@settings(deadline=None, print_blob=True)
@given(
    source=st.sampled_from(sorted(SHIPPED)),
    draft=st.sampled_from(NATIVE),
    gib=st.integers(1, 512),
    per_node=st.sampled_from([None, 8]),
    data=st.data(),
)
def test_a_draft_model_never_needs_less_memory(source, draft, gib, per_node, data):
    facts = SHIPPED[source]
    tensors = [tensor for tensor in facts.costs.tensor if tensor <= 8]
    tensor = data.draw(st.sampled_from(tensors), label="tensor")
    pipeline = data.draw(st.integers(1, min(4, facts.costs.max_pipeline)), label="pipeline")
    plain = make_question(facts, gib, per_node, tensor=tensor, pipeline=pipeline)
    room = room_of(SHIPPED[draft])
    found = [sized(plain), sized(replace(plain, draft=room)), sized(replace(plain, draft=replace(room, weights=0)))]
    if found[1] is None:
        return
    assert None not in found, "a model that fits beside a draft model fits without it"
    assert found[0].kv_tokens >= found[2].kv_tokens >= found[1].kv_tokens
    assert found[0].weights_bytes_per_rank == found[1].weights_bytes_per_rank
    if per_node is not None and found[1].pipeline == 1:
        held = found[1].weights_bytes_per_rank + room.weights + room.kv_block * (found[1].kv_tokens // 16)
        assert held < gib * GIB, "the rank that samples holds all of this"
