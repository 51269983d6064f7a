"""A service whose model must be inspected first: the controller's Jobs, waits, conditions and stored facts."""

from datetime import UTC, datetime

import pytest

from rayloom_operator.kube.client import KubeError
from rt_inspection import COMMIT, DRAFT, DRAFT_COMMIT, HUB_MODEL, ended, facts, failure, make_job_pod
from rt_world import SERVICE, service, with_world

PENDING = {"waiting": {"reason": "ContainerCreating"}}


def seconds_after_noon():
    """The current time, in seconds after noon of the day in the tests' documents."""
    return (datetime.now(UTC) - datetime(2026, 1, 1, 12, 0, tzinfo=UTC)).total_seconds()


async def job_of(world, number=1):
    await world.until(lambda: len(world.kube.named("Job")) == number)
    await world.rest()
    jobs = [each for each in world.kube.objects.values() if each["kind"] == "Job"]
    return max(jobs, key=lambda each: each["metadata"]["name"])


async def ends(world, job, words, code=0):
    world.kube.put(make_job_pod(job, ended(words, seconds_after_noon(), code)))


def config(world):
    (found,) = [each for each in world.kube.objects.values() if each["kind"] == "ConfigMap"]
    return found["data"]["config.json"]


def test_no_engine_is_made_before_its_model_is_known_and_then_it_loads_by_commit():
    async def story(world):
        world.ask_for(service(model=HUB_MODEL))
        job = await job_of(world)
        assert (world.reason(), world.reason("ModelReady")) == ("Inspecting", "Inspecting")
        assert world.reason("Accepted") == "Valid"
        assert world.kube.named("RayCluster") == []
        await ends(world, job, facts())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        assert f'"revision": "{COMMIT}"' in config(world)
        assert world.kube.statuses[-1]["model"]["commit"] == COMMIT

    with_world(story)


def test_an_engine_is_made_once_the_draft_model_fits_and_loads_both_models_by_commit():
    async def story(world):
        drafted = service(model={**HUB_MODEL, "draft": {"source": "hf://acme/draft"}})
        world.ask_for(drafted)
        job = await job_of(world)
        await ends(world, job, failure("Unsupported", "draft_model: hf://acme/draft has another tokenizer"), 78)
        await world.until(lambda: world.reason("ModelReady") == "ModelUnsupported")
        assert world.message("ModelReady").startswith("draft_model: hf://acme/draft has another tokenizer.")
        assert world.kube.named("RayCluster") == []
        world.kube.remove(world.kube.path("Job"))
        world.kube.remove(world.kube.path("Pod"))
        await ends(world, await job_of(world), facts(draft=DRAFT))
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        assert f'"revision": "{COMMIT}"' in config(world)
        assert '"draft_model": "hf://acme/draft"' in config(world)
        assert f'"draft_revision": "{DRAFT_COMMIT}"' in config(world)
        status = world.kube.statuses[-1]
        assert status["model"]["draft"]["commit"] == DRAFT_COMMIT
        assert status["sizing"]["draftWeightsBytes"] == 200

    with_world(story)


def test_an_inspected_model_needs_no_job_any_more_and_a_restarted_operator_makes_none():
    known = {}

    async def first(world):
        world.ask_for(service(model=HUB_MODEL))
        job = await job_of(world)
        await ends(world, job, facts())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        known.update(world.kube.statuses[-1])
        world.kube.remove(world.kube.path("Job"))
        await world.rest()
        assert world.kube.named("Job") == []

    async def restarted(world):
        world.ask_for(service(model=HUB_MODEL) | {"status": known})
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        assert world.kube.named("Job") == []
        assert world.kube.statuses[-1]["model"] == known["model"]

    with_world(first)
    with_world(restarted)


def test_a_missing_model_is_one_event_and_inspected_again_after_the_jobs_are_deleted():
    async def story(world):
        world.ask_for(service(model=HUB_MODEL))
        job = await job_of(world)
        await ends(world, job, failure("NotFound", "hf://acme/tiny does not exist"), 78)
        await world.until(lambda: world.reason() == "ModelNotFound")
        await world.rest()
        assert world.reason("ModelReady") == "ModelNotFound"
        assert len([each for each in world.kube.objects.values() if each.get("reason") == "ModelNotFound"]) == 1
        assert len(world.kube.named("Job")) == 1
        world.kube.remove(world.kube.path("Job"))
        world.kube.remove(world.kube.path("Pod"))
        job = await job_of(world)
        await ends(world, job, facts())
        await world.until(lambda: world.kube.named("RayCluster"))

    with_world(story)


def test_the_inspection_is_repeated_after_a_while_if_the_hub_does_not_answer(monkeypatch):
    monkeypatch.setattr("rayloom_operator.decide.inspection._FIRST_RETRY_S", 0.05)

    async def story(world):
        world.ask_for(service(model=HUB_MODEL))
        job = await job_of(world)
        await ends(world, job, failure("Unreachable"), 78)
        job = await job_of(world, number=2)
        assert job["metadata"]["name"].endswith("-1")
        assert world.reason() == "HubUnreachable"
        await ends(world, job, facts())
        await world.until(lambda: world.kube.named("RayCluster"))

    with_world(story)


def test_a_running_engine_stays_while_the_next_model_is_inspected():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        clusters = world.kube.named("RayCluster")
        changed = service(model=HUB_MODEL)
        changed["metadata"]["generation"] = 2
        world.ask_for(changed | {"status": world.kube.objects[SERVICE]["status"]})
        job = await job_of(world)
        await ends(world, job, failure("Gated"), 78)
        await world.until(lambda: world.reason("ModelReady") == "ModelGated")
        await world.rest()
        assert world.reason() == "PodsPending"  # the state of the earlier engine
        assert world.kube.named("RayCluster") == clusters

    with_world(story)


def test_a_job_that_may_not_be_made_is_a_refusal():
    async def story(world):
        world.kube.refusals = {("create", "-0"): KubeError(403, "exceeded quota")}
        world.ask_for(service(model=HUB_MODEL))
        await world.until(lambda: world.reason("Accepted") == "ApplyRefused")
        assert world.message() == "the API server refused: exceeded quota"
        assert world.reason("Progressing") == "ApplyRefused"

    with_world(story)


def test_why_the_job_gets_no_pod_is_read_from_events():
    async def story(world):
        about = {"involvedObject": {"uid": "uid-of-job"}, "metadata": {"name": "e", "namespace": "team"}}
        words = "Error creating: exceeded quota: small."
        world.kube.put({"apiVersion": "v1", "kind": "Event", "message": words, **about})
        world.ask_for(service(model=HUB_MODEL))
        job = await job_of(world)
        # The controller sees an old Job.
        world.kube.put(job | {"metadata": job["metadata"] | {"uid": "uid-of-job"}})
        await world.until(lambda: "exceeded quota" in world.message("ModelReady"))
        assert world.reason("ModelReady") == "ContainerFailed"

    with_world(story)


def test_a_typo_that_is_taken_back_replaces_no_engine():
    async def story(world):
        world.ask_for(service(model=HUB_MODEL))
        await ends(world, await job_of(world), facts())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        clusters = world.kube.named("RayCluster")
        for number, source in ((2, "hf://acme/tinny"), (3, HUB_MODEL["source"])):
            changed = service(model={"source": source})
            changed["metadata"]["generation"] = number
            world.ask_for(changed | {"status": world.kube.objects[SERVICE]["status"]})
            await world.until(lambda number=number: world.kube.statuses[-1]["observedGeneration"] == number)
            await world.rest()
            # Later a branch may have moved, and the first Job does not exist any more.
            for path in [path for path, each in world.kube.objects.items() if each["kind"] == "Job"]:
                world.kube.remove(path)
            await world.rest()
            assert world.kube.named("RayCluster") == clusters
        assert world.kube.statuses[-1]["model"]["commit"] == COMMIT

    with_world(story)


@pytest.mark.parametrize("name", ["model", "hub-ca"])
def test_a_mount_failure_of_the_jobs_pod_is_read_from_events(name):
    async def story(world):
        world.ask_for(service(model={"source": "file:///models/x"}))
        job = await job_of(world)
        pod = make_job_pod(job, PENDING, volumes=[name])
        words = f'MountVolume.SetUp failed for volume "{name}": it is not there'
        event = {"metadata": {"name": "e", "namespace": "team"}, "involvedObject": {"uid": pod["metadata"]["uid"]}}
        world.kube.put({"apiVersion": "v1", "kind": "Event", "message": words, **event})
        world.kube.put(pod)
        await world.until(lambda: "it is not there" in world.message("ModelReady"))
        assert world.reason("ModelReady") == ("ModelNotFound" if name == "model" else "ContainerFailed")

    with_world(story)


def test_an_invalid_spec_forgets_nothing_of_the_model():
    async def story(world):
        world.ask_for(service(model=HUB_MODEL))
        job = await job_of(world)
        await ends(world, job, facts())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        broken = service(model=HUB_MODEL, replicas="two")
        broken["metadata"]["generation"] = 2
        world.ask_for(broken | {"status": world.kube.objects[SERVICE]["status"]})
        await world.until(lambda: world.reason("Accepted") == "InvalidSpec")
        assert world.kube.statuses[-1]["model"]["commit"] == COMMIT

    with_world(story)
