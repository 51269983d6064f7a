"""The memory of LoRA adapters in the sizing, the status, the worker pods and `plan`.

The comparison with the engine's bytes is in tests/contract/test_adapter_sizing.py.
"""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_operator.__main__ import main
from rayloom_operator.api.costs import AdapterCosts
from rayloom_operator.api.sizing_status import stored_sizing
from rayloom_operator.api.status import Status
from rayloom_operator.errors import DoesNotFit, SpecError
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.rank_memory import AdapterRoom, Cut
from rayloom_operator.resolve.resolved import question, resolve
from rayloom_operator.resolve.revision import revision
from rayloom_operator.resolve.sizing import size
from rayloom_operator.resolve.stage_split import stages
from rt_operator import SETTINGS, make_resolved, make_service
from rt_shapes import GIB, SHIPPED, SMOLLM2, make_costs, make_question

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SOURCE = "builtin://smollm2-135m"
SQL = {"name": "sql", "source": "pvc://adapters/sql"}
# Memory for 4 adapters of 5 pages of 2 MiB, and for a step. With 3 ranks, each rank has 3 pages of an adapter.
ONE_RANK = 4 * 10 * MIB + 7_864_320
ONE_OF_THREE = 4 * 6 * MIB + 3_670_016


def adapted(*adapters, **spec):
    return make_resolved(model={"source": SOURCE, "adapters": list(adapters)}, **spec)


def args(**given):
    return {"engine": {"args": given}}


def on_cpu(memory=2 * GIB, tensor=1, **changes):
    return make_question(SMOLLM2, None, None, memory=memory, tensor=tensor, pipeline=1, keeps_adapters=True, **changes)


def requested(resolved):
    """The memory that a worker pod requests."""
    (workers,) = ray_cluster(resolved, "abcd")["spec"]["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    return worker["resources"]["requests"].get("memory")


def without_adapter_costs(facts):
    return facts.model_copy(update={"costs": facts.costs.model_copy(update={"adapters": None})})


@pytest.mark.parametrize(("tensor", "num_bytes"), [(1, ONE_RANK), (3, ONE_OF_THREE)])
def test_the_status_shows_the_bytes_of_four_adapters_of_rank_16(tensor, num_bytes):
    found = adapted(SQL, parallelism={"tensor": tensor}, **args(maxLoras=4, maxLoraRank=16)).sizing

    assert found.adapters_bytes_per_rank == num_bytes
    document = json.loads(Status(sizing=found).model_dump_json(by_alias=True, exclude_none=True))
    assert document["sizing"]["adaptersBytesPerRank"] == num_bytes
    assert stored_sizing(document) == found


@pytest.mark.parametrize("adapters", [(), (SQL,), [{**SQL, "name": f"a{number}"} for number in range(64)]])
def test_the_settings_decide_and_not_the_number_of_adapters_in_the_list(adapters):
    # By default there are eight adapter slots of LoRA rank 16.
    assert adapted(*adapters).sizing.adapters_bytes_per_rank == 8 * 10 * MIB + 7_864_320


def test_worker_pods_request_the_memory_of_adapters():
    # 96,506,496 bytes of weights, 64 x 10 MiB + 7,864,320 for adapters, and 384 + 168 MiB are 1291.5 MiB.
    assert requested(adapted(SQL, **args(maxLoras=64))) == "1292Mi"
    # 3 x (32,215,680 + 128 x 6 MiB + 3,670,016 + 384 MiB) + 168 MiB are 3726.7 MiB.
    assert requested(adapted(SQL, parallelism={"tensor": 3}, **args(maxLoras=128))) == "3727Mi"
    # If only a limit is set, Kubernetes uses it as the request. So the operator sets no request.
    limited = {"engine": {"resources": {"limits": {"memory": "2Gi"}}, "args": {"maxLoras": 64}}}
    assert requested(adapted(SQL, **limited)) is None


def test_without_adapters_the_settings_change_neither_sizing_nor_memory():
    plain, given = make_resolved(), make_resolved(**args(maxLoras=64, maxLoraRank=256))

    assert plain.sizing.adapters_bytes_per_rank is None
    assert given.sizing == plain.sizing
    assert requested(given) == requested(plain) == "1Gi"


def test_costs_of_adapters_change_no_object_and_no_revision_of_a_service_without_adapters():
    service = make_service(model={"source": SOURCE})
    before, after = (
        resolve(service, SETTINGS.engine_image, facts) for facts in (without_adapter_costs(SMOLLM2), SMOLLM2)
    )

    assert json.dumps(ray_cluster(after, "abcd")) == json.dumps(ray_cluster(before, "abcd"))
    assert (revision(after), after.sizing) == (revision(before), before.sizing)


def test_a_sizing_of_facts_without_costs_of_adapters_stays_valid():
    service = make_service(model={"source": SOURCE, "adapters": [SQL]}, **args(maxLoras=4))
    old = without_adapter_costs(SMOLLM2)
    plain = make_service(model={"source": SOURCE})

    assert question(service, old).inputs == question(plain, old).inputs
    assert resolve(service, SETTINGS.engine_image, old).sizing.adapters_bytes_per_rank is None
    assert question(service, SMOLLM2).inputs != question(plain, SMOLLM2).inputs


def test_another_number_of_slots_is_another_question():
    hashes = {on_cpu(max_loras=count, max_lora_rank=rank).inputs for count in (None, 4, 9) for rank in (None, 32)}

    assert len(hashes) == 6


def test_the_kv_cache_leaves_adapters_free_where_half_of_the_memory_is_too_little_for_them():
    # 2048 - 384 - 168 MiB less 96,506,496 bytes of weights are 1,472,163,200 bytes. Half of these bytes hold 1996
    # blocks of 368,640 bytes. A step takes 512 x (3 x 576 + 3 x 1536) x 2 + 64 x 3 x 49152 x 4 = 44,236,800 bytes.
    assert size(on_cpu(max_loras=64)).kv_tokens == 1996 * 16
    # The adapters need 128 x 10 MiB + 7,864,320 bytes, which leaves 77,884,800 bytes for 211 blocks.
    assert size(on_cpu(max_loras=128)).kv_tokens == 211 * 16
    assert size(on_cpu(memory=None, max_loras=128)).kv_tokens == 11_650 * 16


def test_adapters_that_do_not_fit_are_refused_with_the_settings_to_lower():
    with pytest.raises(DoesNotFit) as refused:
        size(on_cpu(GIB, max_loras=256))
    assert str(refused.value) == (
        "spec.parallelism: TP1xPP1 does not fit: 92 MiB of weights, 2.5 GiB for LoRA adapters and 552 MiB for the "
        "process do not fit in 1.0 GiB; raise spec.engine.resources.limits.memory, or lower spec.engine.args.maxLoras "
        "or maxLoraRank"
    )


@pytest.mark.parametrize(
    "changes",
    [{"token_bytes": [1]}, {"layer": {"elements": [1]}}, {"page_bytes": 0}, {"rank_multiple": 0}],
    ids=str,
)
def test_costs_of_adapters_that_are_incomplete_are_refused(changes):
    costs = make_costs()
    part = {"layer": {"elements": [9, 5, 3]}, "token_bytes": [9, 5, 3], "rank_multiple": 16, "page_bytes": 1}
    document = costs.model_dump(mode="json", exclude_none=True)

    assert type(costs).model_validate(document | {"adapters": part}).adapters == AdapterCosts.model_validate(part)
    with pytest.raises(ValueError, match=r"one number for each|greater than or equal to 1"):
        type(costs).model_validate(document | {"adapters": part | changes})


def test_bytes_that_no_machine_has_are_cut_to_what_a_status_can_hold():
    part = {
        "layer": {"elements": [1 << 52] * 3},
        "token_bytes": [1 << 52] * 3,
        "rank_multiple": 256,
        "page_bytes": 1 << 30,
    }
    room = AdapterRoom(costs=AdapterCosts.model_validate(part), num_adapters=1024, lora_rank=256, num_step_tokens=512)
    (rank,) = Cut(make_costs(), 1, 4, adapters=room).ranks(stages(8, 1, 0.5))

    assert rank.adapters == 1 << 52


def sized(asked):
    try:
        return size(asked)
    except SpecError:
        return None


NAMES = sorted(name for name, facts in SHIPPED.items() if facts.costs.adapters is not None)


@settings(deadline=None, print_blob=True)
@given(
    source=st.sampled_from(NAMES),
    gib=st.integers(1, 512),
    count=st.integers(1, 1024),
    rank=st.integers(1, 256),
    data=st.data(),
)
def test_more_adapters_or_a_higher_rank_never_need_less_memory(source, gib, count, rank, data):
    facts = SHIPPED[source]
    tensor = data.draw(st.sampled_from(facts.costs.tensor), label="tensor")
    pipeline = data.draw(st.integers(1, min(4, facts.costs.max_pipeline)), label="pipeline")
    plain = make_question(facts, gib, None, tensor=tensor, pipeline=pipeline)
    fewer = replace(plain, keeps_adapters=True, max_loras=count, max_lora_rank=rank)
    more = replace(
        fewer,
        max_loras=data.draw(st.integers(count, 1024), label="more adapters"),
        max_lora_rank=data.draw(st.integers(rank, 256), label="higher rank"),
    )
    found = [sized(asked) for asked in (plain, fewer, more)]
    for less, higher in pairwise(found):
        if higher is None:
            continue
        assert less is not None, "a model that fits beside more adapters fits beside fewer"
        assert (less.adapters_bytes_per_rank or 0) <= higher.adapters_bytes_per_rank
        assert less.kv_tokens >= higher.kv_tokens
        assert less.weights_bytes_per_rank == higher.weights_bytes_per_rank
    if found[1] is not None:
        one = facts.costs.adapters.layer.elements[facts.costs.tensor.index(tensor)] * rank
        assert found[1].adapters_bytes_per_rank >= count * one * -(-facts.costs.num_layers // pipeline)


def manifest_with(folder, **model):
    path = folder / "service.yaml"
    document = yaml.safe_load((ROOT / "examples" / "adapters.yaml").read_text(encoding="utf-8"))
    document["spec"]["model"] |= model
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return str(path)


def planned(tmp_path, capsys, **model):
    assert main(["plan", "-f", manifest_with(tmp_path, **model)]) == 0
    return capsys.readouterr().out.splitlines()


def test_plan_prints_the_memory_of_adapters_as_the_page_shows_it(tmp_path, capsys):
    # An adapter of rank 1 has 22,528 numbers in each layer of Qwen3-0.6B. At rank 32, 28 layers of 2-byte numbers are
    # 40,370,176 bytes, in 20 pages. Four adapters are 160 MiB. A step takes 512 x (3072 + 8 x 3072) bytes or 13.5 MiB.
    line = "Each rank keeps 174 MiB for LoRA adapters: 4 in memory at once, of rank 32."

    assert line in planned(tmp_path, capsys)
    assert line in (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")


def test_plan_prints_nothing_about_adapters_of_a_manifest_without_them(tmp_path, capsys):
    assert not [line for line in planned(tmp_path, capsys, adapters=None) if "LoRA" in line]


def test_plan_refuses_adapters_of_a_mixture_of_experts(tmp_path, capsys):
    assert main(["plan", "-f", manifest_with(tmp_path, source="hf://Qwen/Qwen3-30B-A3B")]) == 2
    assert "spec.model.adapters: Qwen3MoeForCausalLM has experts, and LoRA adapters" in capsys.readouterr().err


def test_plan_says_that_it_cannot_count_adapters_of_a_model_with_one_matrix_for_q_k_and_v(tmp_path, capsys):
    lines = planned(tmp_path, capsys, source="hf://microsoft/phi-4")

    assert any(line.startswith("The memory of LoRA adapters is not counted, because the facts") for line in lines)
