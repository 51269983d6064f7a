"""A timeline of a rollout: its engine replicas, and for each the operator's actions and the engine's status.

An engine replica is identified by its group, the name of its RayCluster.
"""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clients.service import Service
from local_kubernetes.machine.shell import ClusterError
from observers.timeline import Timeline

_AGENT = Path(__file__).with_name("engine_agent.py")
_SAMPLE_S = 1.0
CLUSTER_DELETED = "its RayCluster is deleted"  # the entry of `Engine.touches` for this action


@dataclass(slots=True, kw_only=True)
class Engine:
    """The record of one engine replica. Times are Unix times."""

    name: str
    revision: str
    made_at: float
    is_there: bool = False  # the engine's RayCluster exists
    gone_at: float | None = None
    routes: list[tuple[float, bool]] = field(default_factory=list)  # the first value and the changes of the route label
    touches: list[tuple[float, str]] = field(default_factory=list)  # the operator's actions on the engine, in words
    answers: list[tuple[float, dict[str, Any]]] = field(default_factory=list)  # the engine's /status at each time

    @property
    def token_seen_at(self) -> float | None:
        """The time of the engine's first /status with state "serving" and a token that every rank has computed."""
        return next((at for at, said in self.answers if _has_token(said)), None)

    @property
    def routed_at(self) -> float | None:
        return next((at for at, is_routed in self.routes if is_routed), None)


class RolloutTimeline(Timeline):
    """A Timeline that also watches Events, counts RayClusters each second, and polls every engine's status."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.engines: dict[str, Engine] = {}
        self.steps: list[tuple[float, str]] = []  # each reason of Progressing with its time
        self.watched: list[tuple[float, int]] = []  # number of RayClusters after each event of the watch
        self.sampled: list[tuple[float, int]] = []  # number of RayClusters by a request each second
        self._asked: set[str] = set()
        self._stopped = threading.Event()
        self._agent: subprocess.Popen[str] | None = None
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> RolloutTimeline:
        own = self._service
        command = ("exec", "--stdin", "--namespace", own.namespace, own.client.name, "--", "python3", "-c")
        self._agent = own.kubectl.start(*command, _AGENT.read_text())
        threading.Thread(target=self._hear, args=(self._agent,), daemon=True).start()
        super().__enter__()
        self._watch("event", f"/api/v1/namespaces/{own.namespace}/events")
        self._sampler.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stopped.set()
        assert self._agent is not None
        self._agent.kill()
        self._agent.wait()
        super().__exit__(*details)
        self._sampler.join()

    @property
    def most_clusters(self) -> int:
        """The largest number of simultaneous RayClusters, by the watch and by the samples."""
        return max(number for _, number in (*self.watched, *self.sampled))

    def of(self, revision: str) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.revision == revision]

    def step_at(self, step: str) -> float | None:
        """Seconds from the change until a step of the rollout began; None if the step never began."""
        return next((self.seconds(at) for at, word in self.steps if word == step and at >= self.began_at), None)

    def _sample(self) -> None:
        while not self._stopped.wait(_SAMPLE_S):
            with contextlib.suppress(ClusterError):
                self.sampled.append((time.time(), len(self._service.clusters())))

    def _hear(self, agent: subprocess.Popen[str]) -> None:
        assert agent.stdout is not None
        for line in agent.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # the last line may be incomplete
                said = json.loads(line)
                if said["status"] is not None:
                    self._take_answer(self.engines[said["group"]], said["at"], said["status"])

    def _take_answer(self, engine: Engine, at: float, status: dict[str, Any]) -> None:
        had_token = engine.token_seen_at is not None
        engine.answers.append((at, status))
        if not had_token and _has_token(status):
            self.note(at, "engine", f"{engine.name} has made a token")
        if status["state"] == "draining":
            self._touch(engine, at, "it drains")
            if not status["requests"]["in_flight"]:
                self._touch(engine, at, "its last request has ended")

    def _touch(self, engine: Engine, at: float, what: str) -> None:
        if what not in {before for _, before in engine.touches}:
            engine.touches.append((at, what))
            self.note(at, "engine", f"{engine.name}: {what}")

    def _take(self, kind: str, document: dict[str, Any], is_deleted: bool) -> None:
        now, meta = time.time(), document["metadata"]
        if kind == "event":
            if document["involvedObject"].get("name") == self._service.name:
                text = f"{document['type']} {document['reason']}: {document['message']}"
                self._change(now, "event", meta["name"], text)
            return
        super()._take(kind, document, is_deleted)
        labels = meta.get("labels", {})
        if kind == "service" and meta["name"] == self._service.name:
            self._take_step(now, document.get("status", {}))
        elif kind == "cluster" and labels.get("rayloom.dev/service") == self._service.name:
            self._take_cluster(now, meta, is_deleted)
        elif kind == "pod" and labels.get("ray.io/node-type") == "head":
            self._take_head(now, self._engine(now, meta), document, is_deleted)

    def _engine(self, now: float, meta: dict[str, Any]) -> Engine:
        """The engine replica to which the object with this metadata belongs. Events of objects arrive in any order."""
        name, revision = meta["labels"]["rayloom.dev/group"], meta["labels"]["rayloom.dev/revision"]
        return self.engines.setdefault(name, Engine(name=name, revision=revision, made_at=now))

    def _take_step(self, now: float, status: dict[str, Any]) -> None:
        found = [each for each in status.get("conditions", ()) if each["type"] == "Progressing"]
        if found and (not self.steps or self.steps[-1][1] != found[0]["reason"]):
            self.steps.append((now, found[0]["reason"]))

    def _take_cluster(self, now: float, meta: dict[str, Any], is_deleted: bool) -> None:
        engine = self._engine(now, meta)
        if is_deleted or "deletionTimestamp" in meta:
            self._touch(engine, now, CLUSTER_DELETED)
        engine.is_there, engine.gone_at = not is_deleted, now if is_deleted else None
        self.watched.append((now, sum(each.is_there for each in list(self.engines.values()))))

    def _take_head(self, now: float, engine: Engine, pod: dict[str, Any], is_deleted: bool) -> None:
        meta, address = pod["metadata"], pod.get("status", {}).get("podIP")
        is_routed = meta["labels"].get("rayloom.dev/route") == "true" and not is_deleted
        if not engine.routes or engine.routes[-1][1] != is_routed:
            if engine.routes:
                self._touch(engine, now, "it gets requests" if is_routed else "its route label is removed")
            engine.routes.append((now, is_routed))
        if is_deleted or "deletionTimestamp" in meta:
            self._touch(engine, now, "its head pod is terminating")
        if address and meta["uid"] not in self._asked and not is_deleted:
            self._asked.add(meta["uid"])
            # Another thread sends the requests. Requests would delay this thread, which records the times of events.
            threading.Thread(target=self._ask, args=(engine, address), daemon=True).start()

    def _ask(self, engine: Engine, address: str) -> None:
        command = ("get", "secret", f"{engine.name}-admin", "--namespace", self._service.namespace)
        while True:
            try:
                secret = self._service.kubectl.json(*command)
                break
            except ClusterError:  # a busy API server
                if self._stopped.wait(_SAMPLE_S):
                    return
        token = base64.b64decode(secret["data"]["token"]).decode()
        assert self._agent is not None and self._agent.stdin is not None
        self._agent.stdin.write(json.dumps({"group": engine.name, "ip": address, "token": token}) + "\n")
        self._agent.stdin.flush()


def _has_token(status: dict[str, Any]) -> bool:
    return status["state"] == "serving" and status["last_token_age_seconds"] is not None
