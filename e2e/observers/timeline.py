"""A timeline of a service, its pods, RayClusters and nodes, recorded by watches.

with Timeline(service) as timeline:
    timeline.begin("a worker pod is deleted")
    ...
print(timeline.table())
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clients.service import Service
from observers.availability import LATE_S, NOTED_S, untrue_times


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    at: float  # Unix time
    source: str
    text: str


class Timeline:
    """Records events of the service, its pods and RayClusters, and the nodes, until the block ends."""

    def __init__(self, service: Service) -> None:
        self.began_at = time.time()  # time of the fault, after `begin`
        self.available: list[tuple[float, bool]] = []  # value of Available at each change
        self.statuses: list[tuple[float, dict[str, Any]]] = []  # every written status
        self._service = service
        self._entries: list[Entry] = []
        self._known: dict[tuple[str, str], str] = {}
        self._version = 0  # resourceVersion of the last recorded status
        self._watches: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Timeline:
        own = f"namespaces/{self._service.namespace}"
        for kind, path in (
            ("service", f"/apis/rayloom.dev/v1alpha1/{own}/llmservices"),
            ("pod", f"/api/v1/{own}/pods"),
            ("cluster", f"/apis/ray.io/v1/{own}/rayclusters"),
            ("node", "/api/v1/nodes"),
        ):
            self._watch(kind, path)
        return self

    def _watch(self, kind: str, path: str) -> None:
        watch = self._service.kubectl.start("get", "--raw", f"{path}?watch=1&timeoutSeconds=900")
        self._watches.append(watch)
        threading.Thread(target=self._read, args=(kind, watch), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.kill()
            watch.wait()

    def begin(self, what: str, at: float | None = None) -> None:
        """Sets the time of the fault to now, or to this Unix time. All seconds count from this time."""
        self.began_at = time.time() if at is None else at
        self.note(self.began_at, "fault", what)

    def note(self, at: float, source: str, text: str) -> None:
        self._entries.append(Entry(at, source, text))

    def seconds(self, at: float) -> float:
        return at - self.began_at

    def first(self, source: str, words: str) -> float | None:
        """Seconds from the fault to the source's first entry with these words; None without such an entry."""
        return next(
            (self.seconds(each.at) for each in self._since() if each.source == source and words in each.text), None
        )

    def said(self, kind: str, status: str, words: str) -> float | None:
        """Seconds from the fault until the condition first had this status and message; None if that never happened."""
        for at, document in self.statuses:
            each = next((each for each in document.get("conditions", ()) if each["type"] == kind), None)
            if at >= self.began_at and each and each["status"] == status and words in each["message"]:
                return self.seconds(at)
        return None

    def is_current(self) -> bool:
        """True if the timeline has the present status. The watch delivers a written status with a short delay."""
        return self._version >= int(self._service.get()["metadata"]["resourceVersion"])

    def judge_status(self, probes: Sequence[tuple[float, float, str]], over_at: float) -> list[str]:
        """Returns, in words, the periods before `over_at` in which Available was wrong for more than LATE_S.

        Records periods of more than NOTED_S in the timeline. `probes`: (sent at, answered at, failure or empty) of each
        probe.
        """
        answers = [answered for _, answered, failure in probes if not failure]
        since = min(sent for sent, _, _ in probes)
        for words in untrue_times(self.available, answers, since, over_at, NOTED_S):
            self.note(over_at, "status", words)
        return untrue_times(self.available, answers, since, over_at, LATE_S)

    def table(self) -> str:
        lines = [f"{self.seconds(entry.at):8.1f} s  {entry.source:<8} {entry.text}" for entry in self._since()]
        return "\n".join(lines)

    def _since(self) -> list[Entry]:
        return sorted(entry for entry in self._entries if entry.at >= self.began_at)

    def _read(self, kind: str, watch: subprocess.Popen[str]) -> None:
        assert watch.stdout is not None
        for line in watch.stdout:
            with contextlib.suppress(json.JSONDecodeError, KeyError):  # the last line may be incomplete, or an error
                event = json.loads(line)
                self._take(kind, event["object"], event["type"] == "DELETED")

    def _take(self, kind: str, document: dict[str, Any], is_deleted: bool) -> None:
        now, name = time.time(), document["metadata"]["name"]
        if kind == "service":
            if name == self._service.name:
                self._take_status(now, document.get("status", {}))
                self._version = int(document["metadata"]["resourceVersion"])
            return
        if kind in ("pod", "cluster") and self._service.name not in name:
            return
        text = {"pod": _pod, "cluster": _cluster, "node": _node}[kind](document)
        self._change(now, kind, name, f"{text}, gone" if is_deleted else text)

    def _take_status(self, now: float, status: dict[str, Any]) -> None:
        self.statuses.append((now, status))
        conditions = {each["type"]: each for each in status.get("conditions", ())}
        for kind in ("Available", "Degraded", "Progressing", "RolledBack"):
            if each := conditions.get(kind):
                # A message changes with each phase of a start, so the timeline holds only the first message of a
                # reason.
                text = f"{kind} {each['status']} ({each['reason']})"
                self._change(now, "status", kind, text, f": {each['message']}")
        is_available = conditions.get("Available", {}).get("status") == "True"
        if not self.available or self.available[-1][1] != is_available:
            self.available.append((now, is_available))

    def _change(self, now: float, source: str, name: str, text: str, more: str = "") -> None:
        if self._known.get((source, name)) != text:
            self._known[source, name] = text
            self.note(now, source, text + more)


def _pod(pod: dict[str, Any]) -> str:
    meta, status = pod["metadata"], pod.get("status", {})
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions", ()))
    state = "Terminating" if "deletionTimestamp" in meta else status.get("phase", "Pending")
    restarts = sum(each["restartCount"] for each in status.get("containerStatuses", ()))
    again = f", {restarts} restarts" if restarts else ""
    where = pod["spec"].get("nodeName", "no node")
    route = ", routed" if meta.get("labels", {}).get("rayloom.dev/route") == "true" else ""
    return f"{_short(meta['name'])} on {where}: {state}{', ready' if ready else ''}{route}{again}"


def _short(name: str) -> str:
    """The end of a pod's name. This end is unique within the service."""
    return "-".join(name.split("-")[-3:])


def _cluster(cluster: dict[str, Any]) -> str:
    meta = cluster["metadata"]
    return f"RayCluster {meta['name']}{' is being deleted' if 'deletionTimestamp' in meta else ''}"


def _node(node: dict[str, Any]) -> str:
    ready = next((item["status"] for item in node["status"].get("conditions", ()) if item["type"] == "Ready"), "?")
    return f"{node['metadata']['name']} {'is Ready' if ready == 'True' else 'is not Ready'}"
