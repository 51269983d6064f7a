"""The status of a service: the table of what is seen and what is said, and the plan's routes and deletions.

Left out: how things are seen (reflectors, poller); that needs an API server.
"""

from datetime import UTC, datetime

import pytest

from rayloom_operator.api_status import FAULTS, Reason
from rayloom_operator.engine_status import Phase
from rayloom_operator.k8s_events import events
from rayloom_operator.observed import Verdict
from rayloom_operator.plan import plan
from rayloom_operator.revision import revision
from rayloom_operator.status import VALID, judge, status
from rt_operator import SETTINGS, make_group, make_pod, make_reading, make_resolved, make_said

KEY = SETTINGS.operator_key

NOW = 110.0
CLOCK = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LOADING = Phase(name="kv_cache", seconds=1, done=0, total=0, unit="", finished=False)


def waiting(reason, message=""):
    return {"ready": False, "containerID": "", "state": {"waiting": {"reason": reason, "message": message}}}


def crashed(code, message=""):
    last = {"terminated": {"exitCode": code, "message": message, "reason": "Error"}}
    return {"ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": last}


def restarted(code, message=""):
    return crashed(code, message) | {"state": {"running": {}}}


UNSCHEDULABLE = [
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: cpu."},
]


def routed(**kwargs):
    return make_pod(route=True, **kwargs)


def worker(**kwargs):
    return make_pod("worker", is_head=False, **kwargs)


@pytest.mark.parametrize(
    ("group", "reason", "words"),
    [
        (None, Reason.PODS_PENDING, "KubeRay"),
        (make_group(), Reason.PODS_PENDING, "KubeRay"),
        (make_group(worker()), Reason.PODS_PENDING, "head pod is gone"),
        (make_group(make_pod(engine=waiting("ContainerCreating"))), Reason.PODS_PENDING, "head"),
        (make_group(make_pod(), worker(node="", conditions=UNSCHEDULABLE)), Reason.UNSCHEDULABLE, "0/2 nodes: cpu."),
        (make_group(make_pod(engine=waiting("ErrImagePull", "x"))), Reason.IMAGE_PULL_FAILED, "spec.engine.image"),
        (make_group(worker(engine=waiting("ImagePullBackOff")), make_pod()), Reason.IMAGE_PULL_FAILED, "image i"),
        (make_group(make_pod(engine=waiting("CreateContainerConfigError"))), Reason.CONTAINER_FAILED, "engine"),
        (make_group(make_pod(), worker(engine=crashed(1, "boom"))), Reason.CONTAINER_FAILED, "boom"),
        (make_group(make_pod(engine=crashed(78, "no model '/x'"))), Reason.MODEL_NOT_FOUND, "no model '/x'"),
        (make_group(make_pod(engine=restarted(78, "no model '/x'"))), Reason.MODEL_NOT_FOUND, "no model '/x'"),
        (make_group(make_pod(engine=crashed(78, "99 stages"))), Reason.MODEL_UNUSABLE, "99 stages"),
        (make_group(make_pod(engine=crashed(78, "the hub cannot be reached"))), Reason.HUB_UNREACHABLE, "the hub"),
        (make_group(make_pod(engine=crashed(70, "ranks died"))), Reason.ENGINE_FAILED, "ranks died"),
        (make_group(make_pod(engine=crashed(1))), Reason.ENGINE_FAILED, "exit code 1"),
        (make_group(make_pod(engine=restarted(1))), Reason.STARTING, "starts"),
        (make_group(make_pod(mount_failure="/x is not a directory")), Reason.MODEL_NOT_FOUND, "/x is not a directory"),
        (make_group(make_pod(), worker()), Reason.STARTING, "starts"),
    ],
)
def test_before_the_engine_speaks_pods_say_what_is_wrong(group, reason, words):
    verdict = judge(group, NOW)

    assert verdict.reason is reason
    assert words in verdict.message
    assert not verdict.is_loaded


@pytest.mark.parametrize(
    ("head", "said", "reason", "is_loaded"),
    [
        (routed(), make_said(), Reason.SERVING, True),
        (routed(), make_said(token_age=14.9), Reason.SERVING, True),
        (routed(), make_said(token_age=15.0), Reason.TOKENS_STOPPED, True),
        (routed(), make_said(token_age=None), Reason.STARTING, False),
        (routed(ready=False), make_said(), Reason.STARTING, True),
        (make_pod(), make_said(), Reason.STARTING, True),
        (make_pod(), make_said("starting", None, startup=(LOADING,)), Reason.STARTING, False),
        (routed(), make_said("recovering"), Reason.RECOVERING, False),
        (routed(), make_said("draining"), Reason.DRAINING, True),
        (routed(), make_said("failed", None, reason="ranks died"), Reason.ENGINE_FAILED, False),
    ],
)
def test_available_follows_a_token_and_the_way_to_the_engine(head, said, reason, is_loaded):
    verdict = judge(make_group(head, worker(), reading=make_reading(said)), NOW)

    assert (verdict.reason, verdict.is_loaded) == (reason, is_loaded)


def test_a_starting_engine_says_what_it_does_or_what_keeps_its_ranks_away():
    starting = make_reading(make_said("starting", None, startup=(LOADING,)))
    blocked = worker(node="", conditions=UNSCHEDULABLE)

    assert judge(make_group(make_pod(), reading=starting), NOW).message == "The engine starts: kv cache."
    assert judge(make_group(make_pod(), blocked, reading=starting), NOW).reason is Reason.UNSCHEDULABLE


@pytest.mark.parametrize(("silent_s", "reason"), [(4.9, Reason.SERVING), (5.0, Reason.ENGINE_UNREACHABLE)])
def test_a_silent_engine_is_believed_for_five_seconds(silent_s, reason):
    reading = make_reading(make_said(), failing_since=NOW - silent_s, error="no answer")

    assert judge(make_group(routed(), reading=reading), NOW).reason is reason


def test_an_engine_that_was_never_reached_is_not_available():
    reading = make_reading(failing_since=NOW - 60, error="401")

    assert judge(make_group(routed(), reading=reading), NOW).reason is Reason.ENGINE_UNREACHABLE


def test_an_engine_that_ended_is_explained_by_its_pod_at_once():
    reading = make_reading(make_said(), failing_since=NOW - 0.1)
    group = make_group(routed(engine=crashed(70, "ranks died")), reading=reading)

    assert judge(group, NOW).reason is Reason.ENGINE_FAILED


def test_an_old_answer_is_silence():
    assert judge(make_group(routed(), reading=make_reading(make_said(), at=NOW - 20)), NOW).reason is Reason.SERVING
    stale = judge(make_group(routed(), reading=make_reading(make_said(), at=NOW - 20.1)), NOW)

    assert (stale.reason, stale.is_loaded) == (Reason.ENGINE_UNREACHABLE, False)
    assert "older than 20 s" in stale.message


def test_a_rank_that_stands_still_is_no_lost_rank_and_its_seconds_are_not_said():
    first, second = (
        judge(make_group(routed(), reading=make_reading(make_said("recovering", 60, reason=reason))), NOW)
        for reason in ("rank 0 has not advanced for 61 s", "rank 0 has not advanced for 62 s")
    )
    lost = judge(make_group(routed(), reading=make_reading(make_said("recovering", 60, reason="lost rank 1"))), NOW)

    assert (first, first.reason) == (second, Reason.TOKENS_STOPPED)
    assert (lost.reason, lost.is_loaded) == (Reason.RECOVERING, False)


def test_what_keeps_the_replacement_of_a_rank_away_is_said():
    recovering = make_reading(make_said("recovering"))
    blocked = worker(node="", conditions=UNSCHEDULABLE)

    assert judge(make_group(routed(), blocked, reading=recovering), NOW).reason is Reason.UNSCHEDULABLE


def test_how_an_engine_ended_before_is_nothing_once_it_answers():
    starting = make_reading(make_said("starting", None, startup=(LOADING,)))

    assert (
        judge(make_group(make_pod(engine=restarted(78, "no model")), reading=starting), NOW).reason is Reason.STARTING
    )


def test_pods_that_the_api_server_refuses_are_not_kuberays_fault():
    refused = judge(make_group(refusal="pods are forbidden: quota"), NOW)

    assert refused.reason is Reason.CONTAINER_FAILED
    assert "quota" in refused.message


def test_of_a_log_the_end_is_kept():
    long = "x" * 700 + " CUDA out of memory"

    message = judge(make_group(make_pod(engine=crashed(1, long))), NOW).message
    assert message.endswith("CUDA out of memory")
    assert "..." + "x" * (600 - 3 - 19) + " CUDA" in message


def computed(groups=(), resolved=None, problems=(), previous=None, clock=CLOCK, refusal="", revision="00000000"):
    accepted = VALID
    if problems or refusal:
        reason = Reason.INVALID_SPEC if problems else Reason.APPLY_REFUSED
        accepted = Verdict(reason=reason, message="; ".join(problems) or refusal)
    return status(
        resolved,
        accepted,
        groups,
        generation=3,
        revision=revision if resolved else "",
        previous=previous or {},
        now=NOW,
        clock=clock,
    )


SERVING = (make_group(routed(), worker(), reading=make_reading(make_said())),)


def test_a_serving_service_in_full():
    found = computed(SERVING, make_resolved(parallelism={"pipeline": 2}))

    assert (found.shape, found.ready, found.endpoint) == ("TP1xPP2", "1/1", "http://chat.team.svc:8000")
    assert (found.replicas, found.ready_replicas, found.available_replicas) == (1, 1, 1)
    assert (found.observed_generation, found.current_revision) == (3, "00000000")
    assert [(each.type, each.status, each.reason) for each in found.conditions] == [
        ("Accepted", "True", Reason.VALID),
        ("ModelReady", "True", Reason.LOADED),
        ("Available", "True", Reason.SERVING),
    ]
    (group,) = found.groups
    assert (group.name, group.state, group.nodes) == ("chat-00000000-0", "Serving", ("n1", "n2"))


def test_a_time_of_change_moves_only_with_the_status():
    previous = computed(SERVING, make_resolved()).model_dump(mode="json", by_alias=True)
    later = datetime(2026, 1, 2, 4, 0, 0, tzinfo=UTC)
    starting = (make_group(make_pod()),)

    same = computed(SERVING, make_resolved(), previous=previous, clock=later)
    changed = computed(starting, make_resolved(), previous=previous, clock=later)

    assert same.model_dump(mode="json", by_alias=True) == previous
    assert [each.last_transition_time[11:16] for each in changed.conditions] == ["03:04", "04:00", "04:00"]


def test_an_unusable_spec_is_refused_and_leaves_what_runs_alone():
    previous = computed(SERVING, make_resolved()).model_dump(mode="json", by_alias=True)
    found = computed(SERVING, None, ("spec.replicas: no", "spec.model: no"), previous)

    assert found.conditions[0].message == "spec.replicas: no; spec.model: no"
    assert [each.status for each in found.conditions] == ["False", "True", "True"]
    assert found.endpoint == "http://chat.team.svc:8000"
    assert plan(None, SERVING, KEY).wanted == ()


def test_an_unusable_spec_with_nothing_running_says_so_twice():
    found = computed(problems=("spec.replicas: no",))

    assert [each.reason for each in found.conditions] == [Reason.INVALID_SPEC, Reason.LOADING, Reason.INVALID_SPEC]


def test_what_the_api_server_refuses_is_said():
    found = computed(resolved=make_resolved(), refusal="quota")

    assert (found.conditions[0].reason, found.conditions[0].status) == (Reason.APPLY_REFUSED, "False")
    assert (found.conditions[2].reason, found.conditions[2].message) == (Reason.APPLY_REFUSED, "quota")


def test_what_runs_is_judged_while_its_successor_is_refused():
    previous = computed(SERVING, make_resolved()).model_dump(mode="json", by_alias=True)
    found = computed(SERVING, make_resolved(), previous=previous, refusal="quota", revision="11111111")

    assert [each.reason for each in found.conditions] == [Reason.APPLY_REFUSED, Reason.LOADED, Reason.SERVING]
    assert (found.current_revision, found.ready) == ("00000000", "1/1")


def test_events_name_what_is_new_and_are_the_same_when_said_again():
    service = {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "chat", "namespace": "team", "uid": "u"},
    }
    found = computed((make_group(make_pod(engine=crashed(78, "no model"))),), make_resolved())
    written = service | {"status": found.model_dump(mode="json", by_alias=True)}

    (event,) = events(service, found, CLOCK)
    (again,) = events(service, found, CLOCK)
    assert (event["type"], event["reason"], event["note"]) == ("Warning", "ModelNotFound", "no model")
    assert event["metadata"]["name"] == again["metadata"]["name"]
    assert events(written, found, CLOCK) == ()
    assert Reason.SERVING not in FAULTS


def kinds(planned):
    return [each["kind"] for each in planned.wanted]


def test_a_new_service_gets_its_objects_and_the_cluster_last():
    planned = plan(make_resolved(), (), KEY)

    assert kinds(planned) == ["ServiceAccount", "Service", "ConfigMap", "Secret", "RayCluster"]
    assert (planned.deletions, planned.routes) == ((), ())


def test_a_running_group_is_left_as_it_is():
    resolved = make_resolved()
    current = revision(resolved)
    group = make_group(routed(), reading=make_reading(make_said()), name=f"chat-{current}-0", revision=current)
    planned = plan(resolved, (group,), KEY)

    assert kinds(planned) == ["ServiceAccount", "Service", "ConfigMap", "Secret"]
    assert not planned.is_new
    assert (planned.deletions, planned.routes) == ((), ())


def test_a_group_of_another_revision_goes_with_its_cluster_last():
    planned = plan(make_resolved(), SERVING, KEY)

    assert [(each.path, each.uid) for each in planned.deletions] == [
        ("/api/v1/namespaces/team/configmaps/chat-00000000-0", ""),
        ("/api/v1/namespaces/team/secrets/chat-00000000-0-admin", ""),
        ("/apis/ray.io/v1/namespaces/team/rayclusters/chat-00000000-0", "uid-cluster"),
    ]
    assert kinds(planned)[-1] == "RayCluster"


def test_a_cluster_whose_name_is_taken_is_made_later_and_until_then_nothing_goes():
    name = f"chat-{revision(make_resolved())}-0"
    planned = plan(make_resolved(), SERVING, KEY, frozenset({name}))

    assert kinds(planned) == ["ServiceAccount", "Service"]
    assert planned.deletions == ()


@pytest.mark.parametrize(
    ("head", "said", "wanted"),
    [
        (make_pod(), make_said(), True),
        (make_pod(), make_said("recovering"), True),
        (make_pod(), None, None),
        (make_pod(), make_said("draining"), None),
        (routed(), make_said(), None),
        (routed(), None, None),
        (routed(), make_said("draining"), False),
        (routed(engine=restarted(1)), make_said(), False),
        (routed(engine=restarted(1)), None, False),
    ],
)
def test_requests_are_routed_to_engines_that_take_them(head, said, wanted):
    reading = None if said is None else make_reading(said)
    planned = plan(None, (make_group(head, reading=reading),), KEY)

    assert [route.wanted for route in planned.routes] == ([] if wanted is None else [wanted])
