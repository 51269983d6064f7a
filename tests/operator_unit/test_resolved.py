"""Values that a spec omits are computed from the model.

These values stay while their inputs are the same, and are part of the revision.
"""

import pytest

from rayloom_operator.api.base import amount
from rayloom_operator.api.sizing_status import SizingStatus
from rayloom_operator.errors import DoesNotFit, SpecError
from rayloom_operator.resolve.resolved import resolve
from rayloom_operator.resolve.revision import revision
from rt_operator import make_resolved, make_service
from rt_shapes import LLAMA31_8B, LLAMA31_70B

SOURCE = "hf://meta-llama/Llama-3.1-70B-Instruct"


def make_gpu_service(per_node=8, memory="80Gi", length=131_072, **spec):
    model = {"source": SOURCE} | ({"maxModelLen": length} if length else {})
    return make_service(model=model, accelerator={"perNode": per_node, "memory": memory}, **spec)


def resolved(facts=LLAMA31_70B, previous=None, image="i", **kwargs):
    return resolve(make_gpu_service(**kwargs), image, facts, previous or {})


def written(found):
    """The status as the API server holds it."""
    return {"sizing": found.sizing.model_dump(mode="json", by_alias=True)}


def test_two_pods_of_eight_ranks_for_sixteen_long_conversations():
    found = resolved(sizing={"minConcurrentRequests": 16})

    assert (found.tensor, found.pipeline, found.num_pods, found.ranks_per_pod) == (8, 2, 2, 8)
    assert found.max_model_len == 131_072


def test_stages_that_fit_on_a_node_share_a_pod():
    found = resolved(parallelism={"tensor": 2, "pipeline": 4})

    assert (found.num_pods, found.ranks_per_pod) == (1, 8)


def test_only_a_context_that_was_cut_is_in_the_config():
    assert resolved(LLAMA31_8B, length=None).max_model_len is None
    assert resolved(LLAMA31_8B, length=None, memory="24Gi").max_model_len == 54_560
    assert resolved(LLAMA31_8B, length=4096).max_model_len == 4096
    # On a CPU the engine itself measures the available memory.
    assert make_resolved(parallelism={"pipeline": 2}).max_model_len is None


def test_on_a_cpu_there_is_one_rank_unless_the_spec_gives_more():
    found = make_resolved(engine={"resources": {"limits": {"memory": "2Gi"}}})

    assert (found.shape, found.num_pods, found.stages_per_pod) == ("TP1xPP1", 1, 1)
    assert make_resolved(parallelism={"tensor": 3}).shape == "TP3xPP1"
    assert make_resolved(parallelism={"pipeline": 2}).num_pods == 2


def test_without_facts_a_cpu_uses_the_specs_numbers_and_an_accelerator_waits():
    service = make_service(model={"source": SOURCE}, parallelism={"tensor": 2})

    assert resolve(service, "i").shape == "TP2xPP1"
    with pytest.raises(SpecError, match="once the model was inspected"):
        resolve(make_gpu_service(), "i")


def test_facts_change_no_revision_of_a_service_on_cpus():
    for spec in (
        {},
        {"parallelism": {"tensor": 3}},
        {"model": {"source": "builtin://smollm2-135m", "maxModelLen": 64}},
    ):
        assert revision(make_resolved(**spec)) == revision(resolve(make_service(**spec), "rayloom/engine:test"))


def test_the_choice_of_another_version_stays_while_its_inputs_are_the_same():
    before = resolved()
    other = before.sizing.model_copy(update={"tensor": 8, "pipeline": 2, "pods": 2, "nodes": 2})
    status = {"sizing": other.model_dump(mode="json", by_alias=True) | {"fieldOfALaterVersion": 1}}

    assert before.shape == "TP4xPP1"
    status["sizing"]["alternatives"] = [each | {"more": 1} for each in status["sizing"]["alternatives"]]
    assert status["sizing"]["alternatives"]
    assert resolved(previous=status).shape == "TP8xPP2"
    assert resolved(previous=status, length=65_536).shape == "TP2xPP1"
    assert resolved(previous={"sizing": {"tensor": "x"}}) == before


def test_a_sizing_is_read_back_from_the_status_as_it_was():
    found = resolved()

    assert SizingStatus.model_validate(written(found)["sizing"], strict=False) == found.sizing
    assert resolved(previous=written(found)) == found


def test_the_revision_follows_the_computed_numbers_and_not_their_inputs():
    base = revision(resolved())

    assert base == revision(resolved(parallelism={"tensor": 4, "pipeline": 1}))
    assert base == revision(resolved(memory="81Gi"))
    assert base == revision(resolved(sizing={"minConcurrentRequests": 2}))
    assert base != revision(resolved(sizing={"minConcurrentRequests": 16}))
    assert base != revision(resolved(length=65_536))
    # The engine gets another context length.
    assert revision(resolved(LLAMA31_8B, length=None, memory="24Gi")) != revision(
        resolved(LLAMA31_8B, length=None, memory="23Gi")
    )


def test_pinning_the_running_numbers_rolls_nothing():
    def on_hub(commit="c" * 40, **model):
        service = make_service(model={"source": SOURCE, **model})
        return revision(resolve(service, "i", LLAMA31_8B.model_copy(update={"commit": commit})))

    assert on_hub() == on_hub(revision="main") == on_hub(revision="c" * 40)
    assert on_hub() != on_hub(commit="d" * 40)
    assert on_hub() == on_hub(servedName="chat")
    assert on_hub() != on_hub(servedName="other")
    fitting = resolved(LLAMA31_8B, length=None, memory="23Gi")
    assert fitting.max_model_len is not None
    pinned = resolved(LLAMA31_8B, length=fitting.max_model_len, memory="23Gi")
    assert (pinned.max_model_len, revision(pinned)) == (fitting.max_model_len, revision(fitting))


def test_without_a_commit_the_specs_revision_counts():
    def asking(**model):
        return revision(resolve(make_service(model={"source": SOURCE, **model}), "i"))

    assert len({asking(), asking(revision="v1"), asking(revision="v2")}) == 3


def test_a_device_that_is_used_anyway_rolls_nothing():
    def on_cpu(**args):
        return revision(make_resolved(engine={"args": args}))

    assert on_cpu() == on_cpu(device="auto") == on_cpu(device="cpu")
    assert on_cpu() != on_cpu(device="cuda")
    assert revision(resolved()) == revision(resolved(engine={"args": {"device": "cuda"}}))
    assert on_cpu(maxNumSeqs=4) != on_cpu()


def test_a_model_that_does_not_fit_is_refused_before_any_pod():
    with pytest.raises(DoesNotFit, match="use tensor 4 and pipeline 1, which fit"):
        resolved(parallelism={"tensor": 1, "pipeline": 1})
    with pytest.raises(DoesNotFit, match=r"raise spec\.engine\.resources\.limits\.memory"):
        make_resolved(engine={"resources": {"limits": {"memory": "550Mi"}}})


@pytest.mark.parametrize(
    ("quantity", "number"),
    [("80Gi", 80 << 30), ("81559Mi", 81559 << 20), ("1.5Gi", 3 << 29), ("24G", 24_000_000_000), ("1000m", 1), ("7", 7)],
)
def test_a_quantity_is_a_number(quantity, number):
    assert amount(quantity) == number
