"""The status that a kubelet would write for a pod, for each behaviour that a test chooses. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simulated_nodes.crashes import Crash

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """The behaviour of a pod. By default its containers run, and a Job's container ends with code 0."""

    waiting: tuple[str, str] | None = None  # reason and message of a container that cannot start
    ended: tuple[int, str] | None = None  # exit code and termination message of a container that ends each time it runs
    # True: the container is restarted with back-off (`crashes.py`). False: after its first end, the container waits.
    is_restarted: bool = False
    is_oom: bool = False  # the kernel killed the container for lack of memory, with code 137
    mount_failure: str = ""  # the kubelet's message about a volume, in an Event
    is_never_ready: bool = False
    container: str = ""  # name of the affected container; empty: the last container, which is the engine's in head pods
    message: str = ""  # termination message of a Job's container

    @property
    def runs_engine(self) -> bool:
        """True if the engine in a head pod runs. The engine and Ray's container in this pod end together."""
        return not (self.mount_failure or self.waiting or self.ended is not None or self.is_oom)


RUN = Play()
_NO_EVENT = {"restartCount": 0, "containerID": "", "imageID": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The behaviour of engines of one image."""

    play: Play = RUN  # behaviour of these engines' head pods
    engine: Mapping[str, Any] = field(default_factory=dict)  # fields of `engines.Engine`


def pod_status(
    pod: Document, play: Play, *, ip: str, host_ip: str, is_ready: bool, now: str, crash: Crash | None = None
) -> Document:
    """The fields of `status` that a kubelet writes.

    `is_ready` is the result of the engine's readiness probe, `crash` the state of a crashing container.
    """
    containers = [container["name"] for container in pod["spec"]["containers"]]
    images = {container["name"]: container["image"] for container in pod["spec"]["containers"]}
    chosen = play.container or containers[-1]
    is_job = _is_of_job(pod)
    statuses = []
    for name in containers:
        state: Document = {"running": {"startedAt": now}}
        last: Document = {}
        ready = True
        if play.mount_failure:
            state, ready = {"waiting": {"reason": "ContainerCreating"}}, False
        elif name == chosen and play.waiting:
            state, ready = {"waiting": {"reason": play.waiting[0], "message": play.waiting[1]}}, False
        elif name == chosen and (play.ended or play.is_oom):
            code, words = play.ended or (137, "")
            ended = _ended(code, "OOMKilled" if play.is_oom else "", words, now)
            if is_job:
                state, ready = {"terminated": ended}, False
            elif crash is not None and crash.is_running:
                last, ready = {"terminated": ended} if crash.num_restarts else {}, False
            else:
                state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed"}}
                last, ready = {"terminated": ended}, False
        elif is_job:
            state, ready = {"terminated": _ended(0, "Completed", play.message, now)}, False
        elif name in ("engine", "gateway"):
            ready = is_ready and not play.is_never_ready
        elif play.is_never_ready:
            ready = False
        statuses.append(
            {
                "name": name,
                "image": images[name],
                "ready": ready,
                "started": "running" in state,
                "state": state,
                "lastState": last,
                **_NO_EVENT,
                "restartCount": crash.num_restarts if crash is not None and name == chosen else 0,
            }
        )
    is_well = all(status["ready"] for status in statuses)
    has_begun = not (
        play.mount_failure or any("waiting" in each["state"] and not each["lastState"] for each in statuses)
    )
    is_over = is_job and not play.waiting and not play.mount_failure
    phase = "Running" if has_begun else "Pending"
    if is_over:
        phase = "Failed" if play.ended or play.is_oom else "Succeeded"
    conditions = [
        _condition("PodReadyToStartContainers", True, now),
        _condition("Initialized", True, now),
        _condition("ContainersReady", is_well, now),
        _condition("Ready", is_well, now),
        _condition("PodScheduled", True, now),
    ]
    return {
        "phase": phase,
        "hostIP": host_ip,
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "startTime": now,
        "conditions": conditions,
        "containerStatuses": statuses,
        "initContainerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "ready": True,
                "state": {"terminated": _ended(0, "Completed", "", now)},
                **_NO_EVENT,
            }
            for container in pod["spec"].get("initContainers", ())
        ],
    }


def _is_of_job(pod: Document) -> bool:
    return any(owner["kind"] == "Job" for owner in pod["metadata"].get("ownerReferences", ()))


def _ended(code: int, reason: str, message: str, now: str) -> Document:
    reason = reason or ("Completed" if code == 0 else "Error")
    return {"exitCode": code, "reason": reason, "message": message, "startedAt": now, "finishedAt": now}


def _condition(kind: str, holds: bool, now: str) -> Document:
    return {"type": kind, "status": str(holds), "lastTransitionTime": now}
