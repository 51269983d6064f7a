"""Facts without costs from an earlier operator: services keep their sizing, and Jobs inspect the models again.

Only a few Jobs run at a time. The statuses in this file are those that the earlier operator wrote. Not covered: Jobs
for models that were never inspected (test_inspection.py).
"""

import copy
from datetime import UTC, datetime

import pytest

from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.spec import parse
from rayloom_operator.api.status import Reason, stored_model
from rayloom_operator.decide.inspection import Inspection
from rayloom_operator.decide.refresh import MOST_JOBS, Refresh, Refreshes
from rayloom_operator.errors import SpecError
from rayloom_operator.kube.client import KubeError, KubeUnreachable
from rayloom_operator.objects.inspect_job import DEADLINE_SECONDS
from rayloom_operator.objects.old_spec import old_spec, resolved_of
from rayloom_operator.resolve.resolved import Hub, question, resolve
from rayloom_operator.resolve.revision import revision
from rt_inspection import COMMIT, HUB_MODEL, NOON, SHAPE, ended, facts, failure, look, make_job, make_job_pod, old_facts
from rt_operator import make_service
from rt_shapes import LLAMA31_70B, stored, without_costs
from rt_world import SERVICE, service, with_world

RUNNING = {"running": {}}
GIVEN = {"parallelism": {"tensor": 1, "pipeline": 1}}
GPU = {"accelerator": {"memory": "80Gi", "perNode": 8}}
SERVICES = [("team", f"chat-{number}") for number in range(10)]
# The status that an operator of version 0.1.0 wrote. The shape is in camelCase, and the sizing has the hash of its
# inputs.
OLD_STATUS = {
    "model": {
        "source": "hf://meta-llama/Llama-3.1-70B",
        "revision": "",
        "commit": COMMIT,
        "numParameters": 70_553_706_496,
        "shape": {
            "architecture": "LlamaForCausalLM",
            "numLayers": 80,
            "hiddenSize": 8192,
            "intermediateSize": 28672,
            "numHeads": 64,
            "numKvHeads": 8,
            "headDim": 128,
            "vocabSize": 128256,
            "maxPositionEmbeddings": 131072,
            "tieWordEmbeddings": False,
            "checkpointDtype": "bfloat16",
            "qkvBias": False,
            "oBias": False,
            "mlpBias": False,
            "qkNorm": False,
        },
    },
    "sizing": {
        "tensor": 4,
        "pipeline": 1,
        "pods": 1,
        "nodes": 1,
        "weightsBytesPerRank": 35_278_831_616,
        "kvTokens": 538_432,
        "maxModelLen": 131_072,
        "concurrentRequests": 4,
        "advice": "",
        "inputs": "c01e7aac",
        "alternatives": [],
    },
}
SPEC = {"model": {"source": "hf://meta-llama/Llama-3.1-70B", "maxModelLen": 131_072}, **GPU}


def known(found=SHAPE, commit=COMMIT):
    """The status that an operator of an earlier version wrote, with a sizing of one rank, as on CPUs."""
    old = ModelFacts.model_validate_json(old_facts(commit=commit, shape=found)).model_copy(update={"version": None})
    asked = question(make_service(model=HUB_MODEL), old)
    sizing = {"tensor": 1, "pipeline": 1, "pods": 1, "nodes": 1, "weightsBytesPerRank": 3408, "inputs": asked.inputs}
    return {"model": stored(old, HUB_MODEL["source"]), "sizing": sizing}


def test_at_most_four_jobs_run_at_a_time_over_all_services():
    refreshes = Refreshes()
    started = []
    for key in SERVICES:
        if refreshes.may_start(key, "i", 0.0):
            refreshes.note(key, "i", Refresh.STARTING, 0.0)
            started.append(key)

    assert started == SERVICES[:MOST_JOBS] and MOST_JOBS == 4
    refreshes.note(SERVICES[0], "i", Refresh.RUNNING, 5.0)
    assert not refreshes.may_start(SERVICES[4], "i", 5.0)
    refreshes.note(SERVICES[0], "i", Refresh.ENDED, 10.0)
    assert refreshes.may_start(SERVICES[4], "i", 10.0)


def test_an_image_of_a_service_is_tried_once_by_a_process_whatever_its_job_found():
    refreshes = Refreshes()
    refreshes.note(SERVICES[0], "i", Refresh.STARTING, 0.0)
    refreshes.note(SERVICES[0], "i", Refresh.ENDED, 1.0)

    assert not refreshes.may_start(SERVICES[0], "i", 1e6)
    assert refreshes.may_start(SERVICES[0], "another", 1e6)
    refreshes.forget(SERVICES[0])
    assert refreshes.may_start(SERVICES[0], "i", 1e6)


def test_jobs_of_the_previous_operator_count_until_their_service_reports_their_end():
    refreshes = Refreshes()
    refreshes.found(SERVICES[:4], 0.0)

    assert not refreshes.may_start(SERVICES[5], "i", 0.0)
    refreshes.note(SERVICES[1], "i", Refresh.NONE, 1.0)
    assert refreshes.may_start(SERVICES[5], "i", 1.0)


def test_a_job_without_a_report_counts_no_longer_than_its_deadline():
    refreshes = Refreshes()
    refreshes.found(SERVICES[:4], 0.0)

    assert not refreshes.may_start(SERVICES[5], "i", DEADLINE_SECONDS - 1)
    assert refreshes.may_start(SERVICES[5], "i", DEADLINE_SECONDS)


def test_a_service_that_runs_has_its_stored_facts_and_a_job_only_where_there_is_a_place():
    waiting, starting = look(stored=known()), look(stored=known(), may_refresh=True)

    for seen in (waiting, starting):
        assert (seen.facts.costs, seen.facts.commit, seen.verdict, seen.wanted) == (None, COMMIT, None, ())
        assert seen.model == stored_model(known())
    assert (waiting.refresh, waiting.refresh_job) == (Refresh.DUE, None)
    assert starting.refresh is Refresh.STARTING


def test_the_job_inspects_the_commit_that_runs_whatever_a_branch_is_by_now():
    job = look(stored=known(), may_refresh=True).refresh_job
    (container,) = job["spec"]["template"]["spec"]["containers"]

    assert container["command"][-2:] == ["--revision", COMMIT]


def test_the_costs_that_the_job_finds_are_stored_with_the_rest_as_it_was():
    seen = look(ended(facts()), stored=known(), commit=COMMIT)

    assert (seen.refresh, seen.verdict) == (Refresh.ENDED, None)
    assert seen.model.costs is not None
    assert seen.model.version == "v2"
    assert seen.model.model_copy(update={"costs": None, "version": None}) == stored_model(known())
    again = look(stored=known() | {"model": seen.model.model_dump(by_alias=True)})
    assert (again.facts, again.refresh) == (seen.facts, Refresh.NONE)


@pytest.mark.parametrize(
    "state",
    [
        RUNNING,
        None,
        ended(failure("Gated"), code=78),
        ended("Killed", code=137),
        ended(old_facts()),
        ended(facts(shape=SHAPE | {"num_layers": 3})),
        ended(facts(commit="f" * 40)),
    ],
)
def test_a_job_that_fails_or_finds_less_or_another_model_changes_nothing(state):
    seen = look(state, stored=known(), commit=COMMIT)

    assert (seen.model, seen.verdict, seen.wanted) == (stored_model(known()), None, ())
    assert seen.refresh is (Refresh.RUNNING if state in (RUNNING, None) else Refresh.ENDED)


@pytest.mark.parametrize("change", [GPU, {"parallelism": {"tensor": 2}}, GPU | GIVEN])
def test_a_service_that_has_to_be_sized_again_waits_for_its_own_job_at_the_commit_that_runs(change):
    seen = look(stored=known(), **change)

    assert (seen.facts, seen.verdict.reason, seen.refresh) == (None, Reason.INSPECTING, Refresh.NONE)
    assert [each["kind"] for each in seen.wanted] == ["ServiceAccount", "Job"]
    found = look(ended(facts()), stored=known(), commit=COMMIT, **change)
    assert found.facts.costs is not None and found.facts.commit == COMMIT


def test_an_upgrade_keeps_the_sizing_and_the_revision_of_an_old_status():
    old = make_service(**SPEC)
    before = resolve(old, "i", stored_model(OLD_STATUS), OLD_STATUS)
    with_costs = LLAMA31_70B.model_copy(update={"commit": COMMIT})
    after = resolve(old, "i", with_costs, OLD_STATUS)
    anew = resolve(old, "i", with_costs)

    assert stored_model(OLD_STATUS).costs is None
    assert anew.sizing.model_copy(update={"alternatives": ()}) == before.sizing
    assert before.shape == after.shape == "TP4xPP1"
    assert before.sizing == after.sizing
    assert revision(before) == revision(after) == "7251f3cf"
    assert before.checkpoint_bytes == after.checkpoint_bytes == 141_107_412_992


def test_a_choice_of_before_stays_even_where_this_version_would_choose_another():
    status = copy.deepcopy(OLD_STATUS)
    status["sizing"] |= {"tensor": 8, "pipeline": 2, "pods": 2, "nodes": 2}
    old = make_service(**SPEC)

    assert resolve(old, "i", stored_model(status), status).shape == "TP8xPP2"
    assert resolve(old, "i", LLAMA31_70B.model_copy(update={"commit": COMMIT}), status).shape == "TP8xPP2"


def test_an_old_spec_of_before_makes_the_same_engines_again():
    old = make_service(**SPEC)
    before = resolve(old, "i", stored_model(OLD_STATUS), OLD_STATUS)
    found = old_spec(before, revision(before), stored_model(OLD_STATUS))
    meta = {"name": "chat", "namespace": "team", "uid": "uid-1"}

    assert "costs" not in found["data"]["model"]
    assert revision(resolved_of(found, {"metadata": meta}, Hub())) == revision(before)


def test_an_engine_of_an_earlier_version_is_refused_where_numbers_are_computed_with_the_cure():
    found = without_costs(LLAMA31_70B)

    with pytest.raises(SpecError) as caught:
        resolve(make_service(**SPEC), "i", found)
    (problem,) = caught.value.problems
    assert problem.startswith("spec.engine.image: the engine of this image is of an earlier version")
    assert "give spec.parallelism.tensor and spec.parallelism.pipeline" in problem
    with pytest.raises(SpecError, match="earlier version"):
        resolve(make_service(**SPEC, parallelism={"tensor": 4}), "i", found)


def test_an_engine_of_an_earlier_version_serves_with_the_parallelism_that_is_given():
    given = resolve(make_service(**SPEC, parallelism={"tensor": 2, "pipeline": 4}), "i", without_costs(LLAMA31_70B))

    assert (given.shape, given.num_pods, given.ranks_per_pod, given.sizing) == ("TP2xPP4", 1, 8, None)
    assert given.checkpoint_bytes == 141_107_412_992
    on_cpu = resolve(make_service(model=SPEC["model"]), "i", without_costs(LLAMA31_70B))
    assert (on_cpu.shape, on_cpu.sizing) == ("TP1xPP1", None)


def test_facts_of_an_engine_without_costs_are_not_found_again_where_the_parallelism_is_given():
    given = GIVEN | GPU
    first = look(ended(old_facts()), **given)
    status = {"model": first.model.model_dump(by_alias=True)}

    assert (first.facts.version, first.facts.costs) == ("v1", None)
    assert look(stored=status, may_refresh=True, **given) == Inspection(facts=first.model, model=first.model)
    # If the spec omits a number, the Job of another image may find costs.
    open_again = look(stored=status, **GPU)
    assert (open_again.facts, open_again.verdict.reason) == (None, Reason.INSPECTING)


def test_a_service_that_was_refused_before_is_sized_and_not_made_without():
    """The service's status has facts and no sizing."""
    status = {"model": known()["model"]}
    seen = look(stored=status, **GIVEN, **GPU)

    assert (seen.facts, seen.verdict.reason) == (None, Reason.INSPECTING)


def named(name, status, **spec):
    document = service(uid=f"uid-{name}", model=HUB_MODEL, **spec)
    document["metadata"]["name"] = name
    return document | {"status": status}


def seconds_after_noon():
    return (datetime.now(UTC) - NOON).total_seconds()


def end(kube, job, message):
    pod = make_job_pod(job, ended(message, seconds_after_noon()))
    pod["metadata"]["labels"] = dict(job["metadata"]["labels"])
    kube.put(pod)
    kube.put(job | {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})


def jobs_of(kube):
    jobs = [each for each in list(kube.objects.values()) if each["kind"] == "Job"]
    return {each["metadata"]["labels"]["rayloom.dev/service"]: each for each in jobs}


def test_an_upgrade_starts_four_jobs_at_a_time_stores_their_results_and_rolls_nothing():
    async def story(world):
        names = [f"chat-{number}" for number in range(10)]
        for name in names:
            world.ask_for(named(name, known()))
        await world.until(lambda: len(jobs_of(world.kube)) == 4 and len(world.kube.named("RayCluster")) == 10)
        await world.rest()
        clusters = world.kube.named("RayCluster")
        done = set()
        while len(done) < len(names):
            running = {name: job for name, job in jobs_of(world.kube).items() if name not in done}
            assert 0 < len(running) <= 4
            for name, job in running.items():
                end(world.kube, job, facts())
                done.add(name)
            await world.rest()
            for name in set(names) - done:
                # This is the regular reconcile.
                world.controller._queue.add(("team", name))
            await world.rest()
        for name in names:
            status = world.kube.objects[f"/apis/rayloom.dev/v1alpha1/namespaces/team/llmservices/{name}"]["status"]
            assert stored_model(status).costs is not None
            assert stored_model(status).commit == COMMIT
        assert world.kube.named("RayCluster") == clusters
        assert len(jobs_of(world.kube)) == 10

    with_world(story)


@pytest.mark.parametrize("error", [KubeError(403, "exceeded quota"), KubeUnreachable("POST: TimeoutError")])
def test_a_service_whose_job_is_not_created_runs_as_it_did(error, caplog):
    async def story(world):
        document = named("chat", known())
        name = make_job(0, parse(document), commit=COMMIT)["metadata"]["name"]
        world.kube.refusals = {("create", name): error}
        world.ask_for(document)
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        assert world.reason("Accepted") == "Valid"
        assert world.kube.statuses[-1]["model"]["commit"] == COMMIT
        assert jobs_of(world.kube) == {}
        assert "was not created" in caplog.text and "requeued" not in caplog.text

    with_world(story)


def test_a_restarted_operator_counts_the_jobs_of_the_one_before():
    def prepare(kube):
        for number in range(4):
            each = make_service(f"old-{number}", model=HUB_MODEL)
            kube.put(make_job(0, each, commit=COMMIT))

    async def story(world):
        world.ask_for(named("chat", known()))
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        assert "chat" not in jobs_of(world.kube)

    with_world(story, prepare=prepare)


def test_an_image_without_costs_inspects_a_model_once_and_its_service_stays_refused_when_the_job_is_gone():
    """Otherwise a Job would run each quarter of an hour, and the condition Accepted would change with each Job."""

    async def story(world):
        world.ask_for(named("chat", {}, **GPU))
        await world.until(lambda: jobs_of(world.kube))
        job = jobs_of(world.kube)["chat"]
        end(world.kube, job, old_facts())
        await world.until(lambda: world.reason("Accepted") == "InvalidSpec")
        await world.rest()
        world.kube.remove(world.kube.path("Job"))
        world.controller._queue.add(("team", "chat"))
        await world.rest()
        assert (jobs_of(world.kube), world.reason("Accepted")) == ({}, "InvalidSpec")
        # The engine of another image may report costs.
        other = named("chat", world.kube.objects[SERVICE]["status"], engine={"image": "engine:next"}, **GPU)
        other["metadata"]["generation"] = 2
        world.ask_for(other)
        await world.until(lambda: jobs_of(world.kube))

    with_world(story)


def test_facts_of_another_image_say_nothing_about_the_costs_of_this_one():
    async def story(world):
        status = {"model": look(ended(old_facts()), **GIVEN, **GPU).model.model_dump(by_alias=True)}
        world.ask_for(named("chat", status, **GIVEN, **GPU))
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        left_open = named("chat", world.kube.objects[SERVICE]["status"], **GPU)
        left_open["metadata"]["generation"] = 2
        world.ask_for(left_open)
        await world.until(lambda: jobs_of(world.kube))

    with_world(story)
