"""Inspections of a service's model: facts, faults and attempts."""

import json
from datetime import timedelta

import pytest

from rayloom_operator.api.status import Reason, Status
from rayloom_operator.decide.inspection import Tried, inspect
from rayloom_operator.resolve.resolved import Hub, resolve
from rayloom_operator.resolve.revision import revision
from rt_inspection import COMMIT, HUB_MODEL, NOON, SHAPE, at, ended, facts, failure, look, make_job, make_job_pod
from rt_operator import SETTINGS, make_service
from rt_shapes import SMOLLM2

PENDING = {"waiting": {"reason": "ContainerCreating"}}
RUNNING = {"running": {}}


def kinds(seen):
    return [each["kind"] for each in seen.wanted]


def stored(seen):
    """The status document with the facts of this inspection."""
    return Status(model=seen.model).model_dump(mode="json", by_alias=True, exclude_none=True)


def test_a_built_in_model_is_known_without_a_job():
    seen = look(model={"source": "builtin://smollm2-135m"})

    assert (seen.facts, seen.model, seen.wanted) == (SMOLLM2, None, ())


@pytest.mark.parametrize("source", ["hf://acme/tiny", "pvc://claim/model", "file:///models/m"])
def test_any_other_model_is_inspected_by_a_job_first(source):
    seen = look(model={"source": source})

    assert (seen.facts, seen.verdict.reason, kinds(seen)) == (None, Reason.INSPECTING, ["ServiceAccount", "Job"])


@pytest.mark.parametrize("state", [None, PENDING, RUNNING])
def test_a_job_that_runs_is_waited_for(state):
    seen = look(state)

    soon = 5.0 if state is None else None  # to read why the Job has no pod
    assert (seen.verdict.reason, seen.wanted, seen.look_again_s) == (Reason.INSPECTING, (), soon)


def test_the_result_of_the_job_is_read_and_stored():
    seen = look(ended(facts()))

    assert (seen.facts.commit, seen.facts.shape.num_layers, seen.facts.num_parameters) == (COMMIT, 2, 1688)
    assert stored(seen)["model"]["source"] == "hf://acme/tiny"
    again = look(stored=stored(seen))
    assert (again.facts.commit, again.facts.shape, again.wanted) == (COMMIT, seen.facts.shape, ())


@pytest.mark.parametrize("model", [{"source": "hf://acme/other"}, HUB_MODEL | {"revision": "v2"}])
def test_another_source_or_revision_is_inspected_again(model):
    seen = look(stored=stored(look(ended(facts()))), model=model)

    assert (seen.facts, kinds(seen)) == (None, ["ServiceAccount", "Job"])


@pytest.mark.parametrize("attempts", [(), (None,), (RUNNING,), (ended(failure("NotFound")),)])
@pytest.mark.parametrize("seconds", [0, 400])
def test_stored_facts_are_kept_while_another_model_is_inspected(attempts, seconds):
    before = look(ended(facts()))
    seen = look(*attempts, seconds=seconds, stored=stored(before), model={"source": "hf://acme/typo"})

    assert (seen.facts, seen.model) == (None, before.model)
    assert look(stored=stored(seen)).facts.commit == COMMIT


@pytest.mark.parametrize("name", ["chat", "a" * 40])
def test_the_event_of_a_job_without_a_pod_is_read_after_a_while_and_shown_without_random_names(name):
    service = make_service(name, model=HUB_MODEL)
    job = make_job(0, service)
    own = job["metadata"]["name"]

    def seen(seconds, random="x7k2p"):
        # Kubernetes makes names from a prefix in this way.
        said = f'Error creating: pods "{(own + "-")[:58]}{random}" is forbidden: exceeded quota: small.'
        failures = {job["metadata"]["uid"]: said}
        clock = NOON + timedelta(seconds=seconds)
        return inspect(service, SETTINGS.engine_image, Hub(), {}, Tried([job], [], failures), clock)

    assert (seen(4).verdict.reason, seen(4).is_podless, seen(4).look_again_s) == (Reason.INSPECTING, False, 1.0)
    late = seen(5)
    assert (late.verdict.reason, late.is_podless, late.look_again_s) == (Reason.CONTAINER_FAILED, True, 5.0)
    assert "exceeded quota: small. Change the spec" in late.verdict.message
    assert late == seen(5, "9qqz4")
    assert "x7k2p" not in late.verdict.message


def test_a_container_that_a_cluster_adds_is_no_evidence_about_the_model():
    service = make_service(model=HUB_MODEL)
    job = make_job(0, service)
    pod = make_job_pod(job, RUNNING)
    sidecar = {"name": "proxy", "image": "i", "ready": False, "state": ended("bye", code=1)}
    pod["status"]["containerStatuses"].insert(0, sidecar)

    def seen():
        return inspect(service, SETTINGS.engine_image, Hub(), {}, Tried([job], [pod]), NOON)

    assert (seen().facts, seen().wanted, seen().look_again_s) == (None, (), None)
    pod["status"]["containerStatuses"][1]["state"] = ended(facts())
    assert seen().facts.commit == COMMIT


def test_another_token_changes_nothing_that_is_known():
    seen = look(stored=stored(look(ended(facts()))), model=HUB_MODEL | {"tokenSecretRef": {"name": "t", "key": "k"}})

    assert seen.facts is not None


@pytest.mark.parametrize("status", [{}, {"model": {"source": "hf://acme/tiny", "numParameters": 1}}])
def test_a_stored_model_that_lacks_fields_is_inspected_again(status):
    assert kinds(look(stored=status)) == ["ServiceAccount", "Job"]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("NotFound", Reason.MODEL_NOT_FOUND),
        ("NoAccess", Reason.MODEL_NO_ACCESS),
        ("Gated", Reason.MODEL_GATED),
        ("Unsupported", Reason.MODEL_UNSUPPORTED),
        ("Unreachable", Reason.HUB_UNREACHABLE),
        ("Invalid", Reason.MODEL_UNUSABLE),
        ("OfALaterVersion", Reason.MODEL_UNUSABLE),
    ],
)
def test_each_fault_has_its_reason_and_names_the_command_for_a_retry(word, reason):
    seen = look(ended(failure(word, "the words"), code=78))

    assert seen.verdict.reason is reason
    assert seen.verdict.message.startswith("the words.")
    assert "kubectl delete jobs -l rayloom.dev/service=chat" in seen.verdict.message
    assert ("tokenSecretRef" in seen.verdict.message) == (word in ("NoAccess", "Gated"))


@pytest.mark.parametrize(
    ("words", "said"), [("Killed\nby the node", "Killed by the node"), ("", "its log"), ("{}", "{}")]
)
def test_a_job_that_ends_without_an_inspection_has_failed(words, said):
    seen = look(ended(words, code=137))

    assert seen.verdict.reason is Reason.INSPECTION_FAILED
    assert said in seen.verdict.message and "exit code 137" in seen.verdict.message


@pytest.mark.parametrize(
    ("word", "number", "seconds"),
    [("Unreachable", 0, 30), ("Unreachable", 1, 60), ("Unreachable", 4, 300), ("NotFound", 0, 300), ("Gated", 3, 300)],
)
def test_a_failed_attempt_is_followed_by_another_one_after_a_growing_delay(word, number, seconds):
    attempts = [ended(failure(word), -400)] * number + [ended(failure(word), 0)]
    early, due = look(*attempts, seconds=seconds - 1), look(*attempts, seconds=seconds)

    assert (early.wanted, early.look_again_s) == ((), 1.0)
    assert kinds(due) == ["ServiceAccount", "Job"]
    assert due.wanted[1]["metadata"]["name"].endswith(f"-{number + 1}")
    assert due.verdict == early.verdict


def test_the_thousandth_attempt_comes_like_the_tenth():
    service = make_service(model=HUB_MODEL)
    job = make_job(5000, service)
    pods = [make_job_pod(job, ended(failure("Unreachable")))]

    assert inspect(service, SETTINGS.engine_image, Hub(), {}, Tried([job], pods), NOON).look_again_s == 300.0


def test_a_container_that_its_node_lost_has_failed_since_the_job_was_made():
    state = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "finishedAt": None}}

    assert (look(state).verdict.reason, look(state, seconds=10).look_again_s) == (Reason.INSPECTION_FAILED, 20.0)


def test_while_an_attempt_runs_the_one_before_it_gives_the_fault():
    before = look(ended(failure("NotFound"))).verdict

    assert look(ended(failure("NotFound")), PENDING).verdict == before
    assert look(ended(failure("NotFound")), ended(facts())).facts is not None


def test_jobs_that_were_deleted_start_again_with_the_first():
    assert look().wanted[1]["metadata"]["name"] == make_job(0)["metadata"]["name"]


def with_conditions(*conditions, pods=()):
    service = make_service(model=HUB_MODEL)
    job = make_job(0, service, conditions)
    return inspect(
        service, SETTINGS.engine_image, Hub(), {}, Tried([job], [make_job_pod(job, each) for each in pods]), NOON
    )


def condition(kind, **other):
    return {"type": kind, "status": "True", "lastTransitionTime": at(0), **other}


def test_a_job_that_lost_its_pod_has_failed_for_the_reason_that_it_gives():
    seen = with_conditions(condition("Failed", reason="DeadlineExceeded", message="Job was active too long"))

    assert seen.verdict.reason is Reason.INSPECTION_FAILED
    assert "DeadlineExceeded: Job was active too long." in seen.verdict.message
    assert seen.look_again_s == 30.0
    assert "its pod is gone" in with_conditions(condition("Complete")).verdict.message


def test_the_termination_message_of_a_complete_job_is_waited_for():
    assert with_conditions(condition("Complete"), pods=[RUNNING]).verdict.reason is Reason.INSPECTING


def test_the_reason_why_the_pod_does_not_run_is_in_the_message():
    missing = {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hf-token" not found'}}
    pull = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}

    assert 'secret "hf-token" not found' in look(missing).verdict.message
    assert look(pull).verdict.reason is Reason.IMAGE_PULL_FAILED


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ('MountVolume.SetUp failed for volume "model": no such path', Reason.MODEL_NOT_FOUND),
        ('MountVolume.SetUp failed for volume "hub-ca": configmap "ca" not found', Reason.CONTAINER_FAILED),
    ],
)
def test_a_volume_that_cannot_be_mounted_is_named(words, reason):
    pod = look(PENDING).waiting[0]
    seen = look(PENDING, mount_failures={pod["metadata"]["uid"]: words})

    assert (seen.verdict.reason, words in seen.verdict.message) == (reason, True)


def test_ranks_load_by_the_commit_and_another_commit_is_another_revision():
    service = make_service(model=HUB_MODEL)
    revisions = {
        revision(resolve(service, "image", look(ended(facts(commit))).facts)) for commit in (COMMIT, "f" * 40, COMMIT)
    }

    assert len(revisions) == 2


def test_another_image_token_or_service_has_a_job_of_its_own_and_the_time_of_day_none():
    services = [
        make_service(model=HUB_MODEL),
        make_service(model=HUB_MODEL | {"tokenSecretRef": {"name": "t", "key": "k"}}),
        make_service(model=HUB_MODEL, engine={"imagePullSecrets": [{"name": "s"}]}),
    ]
    names = {
        inspect(each, image, Hub(), {}, Tried(), NOON + timedelta(days=days)).wanted[1]["metadata"]["name"]
        for each in services
        for image in ("a", "b")
        for days in (0, 1)
    }

    assert len(names) == 6
    assert all(len(name) <= 63 for name in names)


def test_an_inspection_of_a_later_version_is_not_read_and_the_cure_is_named():
    later = json.dumps({"version": "v9" * 20, "commit": COMMIT, "shape": SHAPE, "num_parameters": 1688})
    seen = look(ended(later))

    assert (seen.facts, seen.verdict.reason, seen.look_again_s) == (None, Reason.INSPECTION_FAILED, 30)
    assert "version v9v9v9v9v9v9v...," in seen.verdict.message
    assert "upgrade it" in seen.verdict.message
