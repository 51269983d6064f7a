"""What one engine does, from what was observed of it. Pure; `now` is the only clock.

Messages hold nothing that changes by itself.
"""

from __future__ import annotations

import re

from rayloom_operator.api.status import Reason
from rayloom_operator.engines.progress import StartProgress
from rayloom_operator.engines.status import EngineStatus
from rayloom_operator.observe.observed import EngineReplica, Pod, Reading, Verdict

# An idle engine sends a token through every rank each 10 s.
TOKEN_AGE_LIMIT_S = 15.0
# An engine that answered is believed for so long after the first question that got no answer: time for a second one,
# a second later, for each fails only after 3 s.
SILENCE_LIMIT_S = 8.0
# Yet never for so long after its last answer: 5 s may pass before the next question, and 3 s before that has failed.
_ANSWER_AGE_LIMIT_S = 9.0
# Where thousands are asked, more than 5 s pass. The second question is put within 4 s, and who is well answers it.
_SECOND_ANSWER_S = 4.5
# Healthy engines are asked each 5 s, or more often. An older answer is no news, whatever became of its successors.
STALE_S = 20.0
# What an engine that recovers says when it has lost no rank, but one stands still.
STALLED = re.compile(r"has not advanced for|no step has ended for")


def judge(group: EngineReplica | None, now: float) -> Verdict:
    """What the group does now, from the surest sign to the weakest: the engine's word, pods, the absence of both."""
    head, reading = (group.head, group.reading) if group is not None else (None, None)
    if group is None or head is None:
        if group is not None and group.fault is not None:
            return group.fault
        if group is not None and group.is_suspended and not group.is_headless:
            return _pending(
                f"RayCluster {group.name} is suspended: it has no pods until its queue, such as Kueue's, admits it."
            )
        if group is not None and group.is_head_evicted:
            message = f"The head pod of {group.name} was told to go, and finishes its requests; then it is made anew."
            return Verdict(reason=Reason.DRAINING, message=message)
        if group is not None and group.is_headless:
            return Verdict(reason=Reason.HEAD_LOST, message=f"The head pod of {group.name} is gone, and its ranks too.")
        if group is not None and group.pods:
            return _pending("The head pod is gone, or about to be.")
        return _pending("KubeRay makes the pods of the engine. If this stays, see whether KubeRay's operator runs.")
    is_mute = reading is not None and now >= mute_at(reading)
    # The failed answer of an engine that has ended is explained by its pod better than by its last word.
    is_believed = silence(reading, now) is None or not (is_mute or group.fault)
    if reading is not None and reading.status is not None and is_believed:
        return _engine_verdict(group, head, reading.status, reading.start)
    if group.fault is not None:
        return group.fault
    has_answered = reading is not None and reading.status is not None and head.is_running
    if reading is not None and (head.is_engine_ready or has_answered) and is_mute:
        error = reading.error or f"its last answer is older than {STALE_S:.0f} s"
        message = f"The engine in pod {head.name} does not answer on its admin port: {error}"
        return Verdict(reason=Reason.ENGINE_UNREACHABLE, message=message)
    waiting = [pod.name for pod in group.pods if not pod.is_running]
    if waiting:
        return _pending(f"Waiting for pods to start: {', '.join(sorted(waiting))}.")
    return Verdict(reason=Reason.STARTING, message="The engine starts.")


def is_well(group: EngineReplica, now: float) -> bool:
    """Whether tokens pass through every rank and the head pod is ready: what it takes to be routed to."""
    head, reading = group.head, group.reading
    if head is None or reading is None or reading.status is None or not head.is_ready:
        return False
    said = reading.status
    return now < mute_at(reading) and said.state == "serving" and said.has_token_within(TOKEN_AGE_LIMIT_S)


def silence(reading: Reading | None, now: float) -> float | None:
    """For how many seconds the engine has not answered; None while it answers, or was not asked."""
    if reading is None:
        return None
    if reading.failing_since is not None:
        return now - reading.failing_since
    return now - reading.at if now - reading.at > STALE_S else None


def mute_at(reading: Reading) -> float:
    """Loop time from which on its last answer is worth nothing, unless another one comes before."""
    since = reading.failing_since
    if since is None:
        return reading.at + STALE_S
    return min(since + SILENCE_LIMIT_S, max(reading.at + _ANSWER_AGE_LIMIT_S, since + _SECOND_ANSWER_S))


def _engine_verdict(group: EngineReplica, head: Pod, said: EngineStatus, start: StartProgress) -> Verdict:
    age = said.last_token_age_seconds
    is_stopped = age is not None and not said.has_token_within(TOKEN_AGE_LIMIT_S)

    def verdict(reason: Reason, message: str) -> Verdict:
        is_loaded = age is not None and reason is not Reason.RECOVERING
        return Verdict(reason=reason, message=message, is_loaded=is_loaded)

    if said.state == "failed":
        return verdict(Reason.ENGINE_FAILED, f"The engine failed: {said.reason}")
    if said.state == "draining":
        return verdict(Reason.DRAINING, "The engine finishes its requests and takes no more.")
    if is_stopped and (said.state == "serving" or STALLED.search(said.reason)):
        return verdict(
            Reason.TOKENS_STOPPED,
            f"No token has passed through every rank for {TOKEN_AGE_LIMIT_S:.0f} s; /status of pod {head.name} says "
            "which rank stands still.",
        )
    if said.state in ("starting", "recovering") and group.workers_fault is not None:
        # What keeps the ranks' pods from running is what the engine waits for. What ended its own container before
        # is over: it answers.
        return group.workers_fault
    if said.state == "recovering":
        return verdict(Reason.RECOVERING, f"The engine replaces lost ranks; requests wait. {said.reason}".strip())
    if said.state == "starting":
        name = next((phase.name for phase in said.startup if not phase.finished), "")
        words = ": ".join(each for each in (name.replace("_", " "), start.amount * (start.phase == name)) if each)
        return verdict(Reason.STARTING, f"The engine starts: {words}." if words else "The engine starts.")
    if age is None:
        return verdict(Reason.STARTING, "The engine makes its first token.")
    if not head.is_ready or not head.is_routed or not group.is_found:
        return verdict(Reason.STARTING, f"The engine serves; requests reach it once clients find pod {head.name}.")
    return verdict(Reason.SERVING, "A token passes through every rank, and requests reach the engine.")


def _pending(message: str) -> Verdict:
    return Verdict(reason=Reason.PODS_PENDING, message=message)
