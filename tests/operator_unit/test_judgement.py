"""The verdict on an engine: a table of observations, with reasons and messages.

Not covered: the observation itself (reflectors, poller), which needs an API server.
"""

import math

import pytest

from rayloom_operator.api.status import Reason
from rayloom_operator.engines.status import Phase
from rayloom_operator.observe.pods import pod
from rayloom_operator.observe.verdict import is_well, judge
from rt_operator import (
    crashed,
    make_group,
    make_pod,
    make_pod_document,
    make_reading,
    make_said,
    restarted,
    waiting,
)

NOW = 110.0
LOADING = Phase(name="kv_cache", seconds=1, done=0, total=0, unit="", finished=False)
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
def test_before_the_engine_answers_pods_show_the_fault(group, reason, words):
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
        (routed(), make_said(token_age=300.0, work_age=14.9), Reason.SERVING, True),  # a long step on a slow machine
        (routed(), make_said(token_age=300.0, work_age=15.0), Reason.TOKENS_STOPPED, True),
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


def test_an_engine_with_the_route_serves_once_clients_find_it():
    verdict = judge(make_group(routed(), worker(), reading=make_reading(make_said()), is_found=False), NOW)

    assert (verdict.reason, verdict.is_loaded) == (Reason.STARTING, True)


def test_the_message_of_a_starting_engine_has_its_phase_or_the_fault_of_its_ranks():
    starting = make_reading(make_said("starting", None, startup=(LOADING,)))
    blocked = worker(node="", conditions=UNSCHEDULABLE)

    assert judge(make_group(make_pod(), reading=starting), NOW).message == "The engine starts: kv cache."
    assert judge(make_group(make_pod(), blocked, reading=starting), NOW).reason is Reason.UNSCHEDULABLE


@pytest.mark.parametrize(("silent_s", "reason"), [(7.9, Reason.SERVING), (8.0, Reason.ENGINE_UNREACHABLE)])
def test_a_silent_engine_is_believed_for_eight_seconds(silent_s, reason):
    reading = make_reading(make_said(), at=NOW - silent_s - 1, failing_since=NOW - silent_s, error="no answer")

    assert judge(make_group(routed(), reading=reading), NOW).reason is reason


@pytest.mark.parametrize(
    ("pause_s", "silent_s", "reason"),
    [
        # The engine counts as serving until 9 s after its last answer. It also counts as serving during the first 4.5 s
        # without an answer to a request, because the second request is sent only after 4 s.
        (1.0, 7.9, Reason.SERVING),
        (1.0, 8.0, Reason.ENGINE_UNREACHABLE),
        (4.0, 4.9, Reason.SERVING),
        (4.0, 5.0, Reason.ENGINE_UNREACHABLE),
        (5.0, 4.4, Reason.SERVING),
        (5.0, 4.5, Reason.ENGINE_UNREACHABLE),
        (15.0, 4.4, Reason.SERVING),
        (15.0, 4.5, Reason.ENGINE_UNREACHABLE),
    ],
)
def test_an_engine_that_swallows_questions_is_believed_until_it_had_time_for_a_second_one(pause_s, silent_s, reason):
    since = NOW - silent_s
    reading = make_reading(make_said(), at=since - pause_s, failing_since=since, error="no answer within 3 s")
    group = make_group(routed(), reading=reading)

    assert (judge(group, NOW).reason, is_well(group, NOW)) == (reason, reason is Reason.SERVING)


@pytest.mark.parametrize(("silent_s", "reason"), [(7.9, Reason.STARTING), (8.0, Reason.ENGINE_UNREACHABLE)])
def test_an_engine_that_never_answered_has_eight_seconds_too(silent_s, reason):
    reading = make_reading(at=math.inf, failing_since=NOW - silent_s, error="refused")

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


def test_the_fault_of_a_ranks_replacement_is_in_the_message():
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


def test_the_message_for_too_little_memory_names_the_limit_to_raise():
    killed = crashed(137)
    killed["lastState"]["terminated"]["reason"] = "OOMKilled"
    ended = "ended (OOMKilled, exit code 137): it left no message; see its log. Raise "

    # This field applies only to worker pods. The containers of the head have limits only if a pod template sets them.
    assert judge(make_group(make_pod(), worker(engine=killed)), NOW).message.endswith(
        f"{ended}spec.engine.resources.limits.memory."
    )
    assert judge(make_group(make_pod(engine=killed)), NOW).message.endswith(
        f"{ended}resources.limits.memory of container engine in spec.podTemplate."
    )


def test_the_message_for_a_failed_pull_names_the_field_of_the_image():
    document = make_pod_document(engine=waiting("ErrImagePull"))
    assert "Check spec.engine.image and" in pod(document).fault.message

    document["status"]["containerStatuses"][0]["name"] = "proxy"
    assert "Check the image of container proxy in spec.podTemplate and" in pod(document).fault.message


@pytest.mark.parametrize(
    ("label", "part"), [("rayloom.dev/gateway", "spec.gateway"), ("rayloom.dev/llmgateway", "spec")]
)
def test_the_messages_of_gateway_pods_name_the_fields_of_their_own_kind(label, part):
    killed = crashed(137)
    killed["lastState"]["terminated"]["reason"] = "OOMKilled"

    def fault(**facts):
        document = make_pod_document(**facts)
        document["metadata"]["labels"] = {label: "public"}
        document["status"]["containerStatuses"][0]["name"] = "gateway"
        return pod(document).fault.message

    assert f"Check {part}.image and" in fault(engine=waiting("ErrImagePull"))
    assert fault(engine=killed).endswith(f"Raise {part}.resources.limits.memory.")
    assert fault(conditions=UNSCHEDULABLE).endswith(f"Add nodes, or lower {part}.resources.")


@pytest.mark.parametrize(
    ("volume", "sentence"),
    [("certificates", "cannot mount a volume that the spec names"), ("model", "cannot mount the model")],
)
def test_a_volume_of_a_pod_template_that_cannot_be_mounted_is_not_called_the_model(volume, sentence):
    document = make_pod_document(volumes=[{"name": "model"}, {"name": "certificates"}])

    assert sentence in pod(document, f'MountVolume.SetUp failed for volume "{volume}" : not found').fault.message


def test_colours_of_a_log_are_left_out():
    worn = crashed(1, "\x1b[31m----- END raylet.out\x1b[39m\n\x1b[1;33mkil\x7fled\x1b[K\x1b]0;title\x07\x1b[0m")

    message = judge(make_group(make_pod(), worker(engine=worn)), NOW).message

    assert message.endswith("ended (Error, exit code 1): ----- END raylet.out killed")


def test_of_a_log_the_end_is_kept():
    long = "x" * 700 + " CUDA out of memory"

    message = judge(make_group(make_pod(engine=crashed(1, long))), NOW).message
    assert message.endswith("CUDA out of memory")
    assert "..." + "x" * (600 - 3 - 19) + " CUDA" in message


def test_an_engine_that_answered_and_fell_silent_does_not_start():
    head = make_pod(engine={"ready": False, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}})
    silent = make_reading(make_said(), failing_since=NOW - 6, error="no answer")
    unheard = make_reading(None, failing_since=NOW - 6, error="refused")

    assert judge(make_group(head, reading=silent), NOW).reason is Reason.ENGINE_UNREACHABLE
    assert judge(make_group(head, reading=unheard), NOW).reason is Reason.STARTING


def test_a_lost_head_is_distinguished_from_one_that_is_being_created():
    assert judge(make_group(worker(), is_headless=True), NOW).reason is Reason.HEAD_LOST
    assert judge(make_group(worker(), is_headless=False), NOW).reason is Reason.PODS_PENDING


def test_the_message_for_a_failed_pod_has_the_reason():
    failed = make_pod(phase="Failed", engine=waiting("ContainerCreating"))

    assert judge(make_group(failed), NOW).message == "pod head has failed (Failed: )"


@pytest.mark.parametrize(
    ("head", "reading", "expected"),
    [
        (make_pod(), make_reading(make_said()), True),  # also before the engine gets requests
        (make_pod(ready=False), make_reading(make_said()), False),
        (make_pod(), make_reading(make_said(token_age=15.0)), False),
        (make_pod(), make_reading(make_said(token_age=None)), False),
        (make_pod(), make_reading(make_said("recovering")), False),
        (make_pod(), make_reading(make_said(), at=NOW - 8.5, failing_since=NOW - 8), False),
        (make_pod(), make_reading(make_said(), at=NOW - 8.5, failing_since=NOW - 7.9), True),
        (make_pod(), None, False),
        (worker(), make_reading(make_said()), False),
    ],
)
def test_an_engine_is_well_if_it_could_take_all_requests(head, reading, expected):
    assert is_well(make_group(head, reading=reading), NOW) is expected
