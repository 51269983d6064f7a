"""The verdict on an engine replica, from its observations. Pure.

The engine's own answer is the surest evidence. Without a valid answer the verdict follows from the pods, or from their
absence. Messages contain nothing that changes with time alone.
"""

from __future__ import annotations

import re

from rayloom_operator.api.status import Reason
from rayloom_operator.engines.progress import StartProgress
from rayloom_operator.engines.status import EngineStatus
from rayloom_operator.observe.observed import EngineReplica, Pod, Reading, Verdict

# If the last token is older than this many seconds, an engine does not count as serving. An idle engine sends a token
# through every rank every 10 s.
TOKEN_AGE_LIMIT_S = 15.0
# After a first unanswered request, the engine's last answer stays valid for at most this many seconds. A request fails
# after 3 s, and the next request is sent a second later. So a second request can fail within this time.
SILENCE_LIMIT_S = 8.0
# Once a request has failed, an answer older than this many seconds is no longer valid. Requests are up to 5 s apart,
# and a request fails after 3 s.
_ANSWER_AGE_LIMIT_S = 9.0
# An answer older than _ANSWER_AGE_LIMIT_S is still valid for this many seconds after the first failed request. With
# thousands of engines, requests are more than 5 s apart. A second request is sent within 4 s after the failure, and an
# engine that serves answers this request.
_SECOND_ANSWER_S = 4.5
# An answer that is older than this many seconds is not valid, even if no request has failed. Engines that serve are
# polled at least every 15 s.
STALE_S = 20.0
# Matches the reason that an engine reports while it recovers from a hung rank. The reason for a lost rank does not
# match.
STALLED = re.compile(r"has not advanced for|no step has ended for")


def judge(replica: EngineReplica | None, now: float) -> Verdict:
    """Returns the verdict on an engine replica. `replica`: None before it exists. `now`: the event loop's time."""
    if replica is None:
        return _UNMADE
    head, reading = replica.head, replica.reading
    if head is None:
        return _without_head(replica)
    if reading is not None and reading.status is not None and _counts(replica, reading, now):
        return _by_answer(replica, head, reading.status, reading.start)
    if replica.fault is not None:
        return replica.fault
    if reading is not None and _is_unreachable(head, reading, now):
        error = reading.error or f"its last answer is older than {STALE_S:.0f} s"
        message = f"The engine in pod {head.name} does not answer on its admin port: {error}"
        return Verdict(reason=Reason.ENGINE_UNREACHABLE, message=message)
    waiting = sorted(pod.name for pod in replica.pods if not pod.is_running)
    if waiting:
        return _pending(f"Waiting for pods to start: {', '.join(waiting)}.")
    return Verdict(reason=Reason.STARTING, message="The engine starts.")


def is_well(replica: EngineReplica, now: float) -> bool:
    """Returns whether tokens pass through every rank and the head pod is ready: the engine may get requests."""
    head, reading = replica.head, replica.reading
    if head is None or reading is None or reading.status is None or not head.is_ready:
        return False
    status = reading.status
    return now < unreachable_at(reading) and status.state == "serving" and status.has_token_within(TOKEN_AGE_LIMIT_S)


def silence(reading: Reading | None, now: float) -> float | None:
    """Returns the seconds for which the engine has not answered; None while it answers, or before the first request."""
    if reading is None:
        return None
    if reading.failing_since is not None:
        return now - reading.failing_since
    return now - reading.at if now - reading.at > STALE_S else None


def unreachable_at(reading: Reading) -> float:
    """Returns the time at which the last answer becomes invalid, unless the engine answers again before."""
    since = reading.failing_since
    if since is None:
        return reading.at + STALE_S
    return min(since + SILENCE_LIMIT_S, max(reading.at + _ANSWER_AGE_LIMIT_S, since + _SECOND_ANSWER_S))


def _counts(replica: EngineReplica, reading: Reading, now: float) -> bool:
    """Returns whether the verdict follows from the engine's last answer.

    Once the engine stops answering, a fault of a pod outweighs the last answer: the fault explains better why the
    engine ended.
    """
    if silence(reading, now) is None:
        return True
    return now < unreachable_at(reading) and replica.fault is None


def _is_unreachable(head: Pod, reading: Reading, now: float) -> bool:
    """Returns whether the engine does not answer although it is ready, or although it runs and has answered before."""
    should_answer = head.is_engine_ready or (reading.status is not None and head.is_running)
    return should_answer and now >= unreachable_at(reading)


def _pending(message: str) -> Verdict:
    return Verdict(reason=Reason.PODS_PENDING, message=message)


_UNMADE = _pending("KubeRay makes the pods of the engine. If this stays, see whether KubeRay's operator runs.")


def _without_head(replica: EngineReplica) -> Verdict:
    if replica.fault is not None:
        return replica.fault
    if replica.is_suspended and not replica.is_headless:
        return _pending(
            f"RayCluster {replica.name} is suspended: it has no pods until its queue, such as Kueue's, admits it."
        )
    if replica.is_head_evicted:
        message = f"The head pod of {replica.name} was deleted or evicted, and finishes its requests; then the engine "
        return Verdict(reason=Reason.DRAINING, message=message + "is recreated.")
    if replica.is_headless:
        return Verdict(reason=Reason.HEAD_LOST, message=f"The head pod of {replica.name} is gone, and its ranks too.")
    if replica.pods:
        return _pending("The head pod is gone, or about to be.")
    return _UNMADE


def _by_answer(replica: EngineReplica, head: Pod, status: EngineStatus, start: StartProgress) -> Verdict:
    """Returns the verdict that follows from the engine's answer. `start` is the last reported progress of its start."""
    if status.state == "failed":
        return _verdict(Reason.ENGINE_FAILED, f"The engine failed: {status.reason}", status)
    if status.state == "draining":
        return _verdict(Reason.DRAINING, "The engine finishes its requests and takes no more.", status)
    if _has_stopped(status):
        message = (
            f"No token has passed through every rank for {TOKEN_AGE_LIMIT_S:.0f} s; /status of pod {head.name} says "
            "which rank stands still."
        )
        return _verdict(Reason.TOKENS_STOPPED, message, status)
    if status.state in ("starting", "recovering") and replica.workers_fault is not None:
        # The engine waits for the worker pods. A fault of the head pod is ignored: the engine answers, so that fault is
        # over.
        return replica.workers_fault
    if status.state == "recovering":
        message = f"The engine replaces lost ranks; requests wait. {status.reason}".strip()
        return _verdict(Reason.RECOVERING, message, status)
    if status.state == "starting":
        return _verdict(Reason.STARTING, _start_message(status, start), status)
    if status.last_token_age_seconds is None:
        return _verdict(Reason.STARTING, "The engine makes its first token.", status)
    if not head.is_ready or not head.is_routed or not replica.is_found:
        message = f"The engine serves; requests reach it once clients find pod {head.name}."
        return _verdict(Reason.STARTING, message, status)
    return _verdict(Reason.SERVING, "A token passes through every rank, and requests reach the engine.", status)


def _verdict(reason: Reason, message: str, status: EngineStatus) -> Verdict:
    # If a token has passed through every rank, every rank has loaded the model. During a recovery this may be untrue,
    # because a rank that replaces a lost rank has to load the model first.
    is_loaded = status.last_token_age_seconds is not None and reason is not Reason.RECOVERING
    return Verdict(reason=reason, message=message, is_loaded=is_loaded)


def _has_stopped(status: EngineStatus) -> bool:
    """Returns True if no token has passed lately, and the engine reports that it serves or that a rank hangs."""
    if status.last_token_age_seconds is None or status.has_token_within(TOKEN_AGE_LIMIT_S):
        return False
    return status.state == "serving" or STALLED.search(status.reason) is not None


def _start_message(status: EngineStatus, start: StartProgress) -> str:
    phase = next((each.name for each in status.startup if not each.finished), "")
    words = [phase.replace("_", " ")] if phase else []
    if start.phase == phase and start.amount:
        words.append(start.amount)
    return f"The engine starts: {': '.join(words)}." if words else "The engine starts."
