"""Simulated kubelets: they register Nodes without machines and write the status of the pods on them.

The API server, the scheduler, the controllers, KubeRay and the operator are real. Only containers are simulated, here
and in `engines`. `make e2e` runs real kubelets and the real engine.
"""

from __future__ import annotations

import asyncio
import base64
import json
from datetime import UTC, datetime

from simulated_nodes.addresses import pod_ip
from simulated_nodes.api_client import MERGE, Api, ApiError
from simulated_nodes.crashes import crash
from simulated_nodes.engines import Engine, Engines
from simulated_nodes.gateways import SERVICE_LABEL, Gateway, is_gateway, models_hash, secret_name, services_of
from simulated_nodes.nodes import FAILURES, NODES, Nodes
from simulated_nodes.pod_status import RUN, Document, Play, Release, pod_status

_RETRY_S = 0.5
_GOOD = Release()


class Kubelets:
    """The kubelets of all simulated nodes. All methods are called in one event loop."""

    def __init__(self, api: Api, engines: Engines) -> None:
        self._api = api
        self.nodes = Nodes(api)
        self._engines = engines
        self._plays: dict[tuple[str, str, str], Play] = {}  # (namespace, service, role)
        self._releases: dict[str, Release] = {}  # image -> its release
        self._pods: dict[str, Document] = {}  # uid -> pod on one of these nodes
        self._services: dict[tuple[str, str], dict[str, None]] = {}  # (namespace, service) -> uids of its pods
        self._ips: dict[str, str] = {}  # uid -> address
        self._crashing_since: dict[str, float] = {}  # uid of a pod -> time of its first crash
        self._sent: dict[str, str] = {}  # uid -> the last status that was written, without times
        self._well: set[str] = set()  # uids of pods that are ready
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._num_ips = 0
        # The benchmark sets this to True: a pod is then ready in its first status, which saves a write for each pod.
        self.skips_unready_pods = False
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Creates Ready nodes, and runs the pods on these nodes from now on."""
        await self.nodes.start()
        self._background = [asyncio.create_task(self.nodes.beat()), asyncio.create_task(self._follow())]

    async def close(self) -> None:
        for task in (*self._background, *self._tasks.values()):
            task.cancel()
        await self.nodes.remove()

    def play(self, namespace: str, service: str, role: str, play: Play) -> None:
        """Sets the behaviour of a service's pods of the role head, worker, gateway or job from now on."""
        self._plays[(namespace, service, role)] = play
        for uid in self._of_service(namespace, service):
            self._sync_soon(uid)

    def release(self, image: str, release: Release) -> None:
        """Sets the behaviour of engines of this image that start from now on."""
        self._releases[image] = release

    def engine(self, namespace: str, service: str, cluster: str = "") -> Engine | None:
        """The engine of this RayCluster; without a name, the engine of the newest head pod."""
        engines = self.engines(namespace, service)
        return engines.get(cluster) if cluster else next(reversed(engines.values()), None)

    def engines(self, namespace: str, service: str) -> dict[str, Engine]:
        """RayCluster -> running engine, for all of the service's engines."""
        return {
            self._pods[uid]["metadata"]["labels"]["ray.io/cluster"]: engine
            for uid in self._of_service(namespace, service)
            if (engine := self._engines.by_ip.get(self._ips.get(uid, ""))) is not None
        }

    def pod_at(self, ip: str) -> Document | None:
        return next((self._pods[uid] for uid, each in self._ips.items() if each == ip and uid in self._pods), None)

    def changed(self, namespace: str, service: str) -> None:
        """Updates the service's pods after a test has changed an engine: the change may affect their readiness."""
        for uid in self._of_service(namespace, service):
            self._sync_soon(uid)

    async def lose(self, node: str) -> None:
        """Simulates the loss of the machine: its pods stay, their engines are silent, the Node is NotReady at once."""
        self.nodes.lost.add(node)
        for uid, pod in self._pods.items():
            if pod["spec"]["nodeName"] == node and (engine := self._engines.by_ip.get(self._ips.get(uid, ""))):
                engine.is_silent = True
        await self.nodes.report(node, "Unknown")

    async def bring_back(self, node: str) -> None:
        """Simulates a restart of the machine: its kubelet restarts all containers."""
        self.nodes.lost.discard(node)
        await self.nodes.report(node, "True")
        for uid, pod in self._pods.items():
            if pod["spec"]["nodeName"] == node:
                self._sent.pop(uid, None)
                self._sync_soon(uid)

    def _of_service(self, namespace: str, service: str) -> tuple[str, ...]:
        return tuple(self._services.get((namespace, service), ()))

    async def _follow(self) -> None:
        async for kind, pod in self._api.follow("/api/v1/pods"):
            uid = pod["metadata"]["uid"]
            if pod["spec"].get("nodeName") not in NODES:
                continue
            mates = self._services.setdefault(_service_of(pod), {})
            if kind == "DELETED":
                mates.pop(uid, None)
                self._pods.pop(uid, None)
                self._sent.pop(uid, None)
                self._crashing_since.pop(uid, None)
                self._well.discard(uid)
                ip = self._ips.pop(uid, "")
                self._engines.by_ip.pop(ip, None)
                self._engines.gateways.pop(ip, None)
                self._refresh_cluster(pod)
            else:
                mates[uid] = None
                self._pods[uid] = pod
                self._sync_soon(uid)

    def _sync_soon(self, uid: str) -> None:
        if uid in self._tasks:
            self._again.add(uid)
            return
        self._tasks[uid] = asyncio.create_task(self._sync(uid))

    async def _sync(self, uid: str) -> None:
        while True:
            self._again.discard(uid)
            delay = 0.0
            if (pod := self._pods.get(uid)) is not None and pod["spec"]["nodeName"] not in self.nodes.lost:
                try:
                    delay = await self._update(uid, pod)
                except FAILURES:
                    # If the pod was deleted, the watch reports the deletion, and no second attempt follows.
                    delay = _RETRY_S
            if delay:
                await asyncio.sleep(delay)
            elif uid not in self._again:
                # An await between the check and this line would lose an update that is requested in between.
                del self._tasks[uid]
                return

    async def _update(self, uid: str, pod: Document) -> float:
        """Updates one pod. Returns the seconds until its next update; 0: no update is planned."""
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        if "deletionTimestamp" in meta:
            self._engines.by_ip.pop(self._ips.get(uid, ""), None)
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            await self._api.request("DELETE", path, body)
            return 0.0
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return 0.0
        play = self._play_of(pod)
        delay = 0.0
        ip = self._next_ip(uid)
        if not play.runs_engine:
            self._engines.by_ip.pop(ip, None)
        elif missing := await self._missing(uid, pod):
            # A kubelet retries the mount and reports the failure in an Event.
            play, delay = Play(mount_failure=missing), _RETRY_S
        if play.runs_engine and is_gateway(pod):
            # The pod is updated again until the gateway has a tokenizer.
            delay = delay or await self._start_gateway(ip, pod)
        engine = self._engines.by_ip.get(ip) or self._engines.gateways.get(ip)
        if self.skips_unready_pods and engine is not None and not engine.is_ready:
            return delay
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        is_ready = engine is not None and engine.is_ready
        crashed = None
        if play.is_restarted:
            began = self._crashing_since.setdefault(uid, asyncio.get_running_loop().time())
            crashed = crash(asyncio.get_running_loop().time() - began)
            delay = min(crashed.changes_in_s, _RETRY_S)
        status = pod_status(pod, play, ip=ip, host_ip="127.0.0.1", is_ready=is_ready, now=now, crash=crashed)
        essence = json.dumps(status).replace(now, "")
        if self._sent.get(uid) != essence:
            if play.mount_failure and uid not in self._sent:
                await self._write_event(pod, "FailedMount", play.mount_failure)
            await self._api.request("PATCH", f"{path}/status", {"status": status}, content_type=MERGE)
            self._sent[uid] = essence
            self._well.discard(uid)
            if all(each["ready"] for each in status["containerStatuses"]):
                self._well.add(uid)
            self._refresh_cluster(pod)
        return delay

    async def _start_gateway(self, ip: str, pod: Document) -> float:
        """Starts the gateway of a pod. The gateway gets its tokenizer from any serving engine of its services.

        Returns the seconds until the next attempt; 0 when the gateway has a tokenizer. When a pod changes, the kubelet
        updates the models file of the pod's gateway. So a gateway with several models then reads its models file again.
        """
        meta = pod["metadata"]
        gateway = self._engines.gateways.get(ip)
        if gateway is None or not gateway.has_text or gateway.models_hash:
            path = f"/api/v1/namespaces/{meta['namespace']}/secrets/{secret_name(pod)}"
            secret = await self._api.request("GET", path)
            if gateway is None:
                token = base64.b64decode(secret["data"]["token"]).decode()
                gateway = self._engines.gateways[ip] = Gateway(token=token)
            gateway.models_hash = models_hash(secret)
            fleets = [self.engines(meta["namespace"], each) for each in services_of(pod, secret)]
            gateway.has_text = gateway.has_text or any(
                each.said_state == "serving" for fleet in fleets for each in fleet.values()
            )
        return 0.0 if gateway.has_text else _RETRY_S

    def gateways(self, namespace: str, service: str) -> dict[str, Gateway]:
        """Name of a pod -> gateway, for all of the service's gateways that run."""
        return {
            self._pods[uid]["metadata"]["name"]: gateway
            for uid in self._of_service(namespace, service)
            if (gateway := self._engines.gateways.get(self._ips.get(uid, ""))) is not None
        }

    def _play_of(self, pod: Document) -> Play:
        meta = pod["metadata"]
        labels = meta.get("labels", {})
        kinds = {owner["kind"] for owner in meta.get("ownerReferences", ())}
        role = "job" if "Job" in kinds else "gateway" if is_gateway(pod) else labels.get("ray.io/node-type", "")
        otherwise = self._release_of(pod).play if role == "head" else RUN
        return self._plays.get((meta["namespace"], labels.get(SERVICE_LABEL, ""), role), otherwise)

    def _release_of(self, pod: Document) -> Release:
        return self._releases.get(pod["spec"]["containers"][-1]["image"], _GOOD)

    async def _missing(self, uid: str, pod: Document) -> str:
        """Starts the engine of a head pod and returns "", or returns the reason why its volumes cannot be mounted."""
        meta = pod["metadata"]
        labels = meta.get("labels", {})
        is_head = labels.get("ray.io/node-type") == "head"
        has_started = self._ips.get(uid) in self._engines.by_ip if is_head else uid in self._well
        if not (is_head or is_gateway(pod)) or has_started:
            return ""
        base = f"/api/v1/namespaces/{meta['namespace']}"
        sources = next(each for each in pod["spec"]["volumes"] if each["name"] == "config")["projected"]["sources"]
        files: dict[str, str] = {}  # path in the volume -> content
        for source in sources:
            if "downwardAPI" in source:
                continue
            kind = "configMap" if "configMap" in source else "secret"
            name = source[kind]["name"]
            try:
                found = await self._api.request("GET", f"{base}/{kind.lower()}s/{name}")
            except ApiError as error:
                if error.code != 404:
                    raise
                return f'MountVolume.SetUp failed for volume "config" : {kind.lower()} "{name}" not found'
            for item in source[kind]["items"]:
                content = found["data"][item["key"]]
                files[item["path"]] = content if kind == "configMap" else base64.b64decode(content).decode()
        if not is_head:
            return ""
        config = json.loads(files["config.json"])
        num_ranks = config.get("tensor_parallel_size", 1) * config.get("pipeline_parallel_size", 1)
        cluster = meta["labels"]["ray.io/cluster"]
        num_pods = 1
        if num_ranks > 1:
            ray = await self._api.request(
                "GET", f"/apis/ray.io/v1/namespaces/{meta['namespace']}/rayclusters/{cluster}"
            )
            num_pods = sum(group["replicas"] for group in ray["spec"]["workerGroupSpecs"])
        self._engines.by_ip[self._next_ip(uid)] = Engine(
            token=files["admin/token"],
            num_ranks=num_ranks,
            ranks_per_pod=max(1, num_ranks // max(1, num_pods)),
            adapters=_adapters_of(config),
            **self._release_of(pod).engine,
        )
        self._refresh_cluster(pod)
        return ""

    def _refresh_cluster(self, pod: Document) -> None:
        """Sets the nodes of the engine's ranks to the nodes of the RayCluster's running worker pods."""
        cluster = pod["metadata"].get("labels", {}).get("ray.io/cluster")
        if cluster is None:
            return
        members = [
            (uid, each)
            for uid in self._of_service(*_service_of(pod))
            if (each := self._pods[uid])["metadata"]["labels"].get("ray.io/cluster") == cluster
            and "deletionTimestamp" not in each["metadata"]
        ]
        kinds = {uid: each["metadata"]["labels"].get("ray.io/node-type") for uid, each in members}
        workers = [each["spec"]["nodeName"] for uid, each in members if kinds[uid] == "worker" and uid in self._well]
        for uid, kind in kinds.items():
            engine = self._engines.by_ip.get(self._ips.get(uid, "")) if kind == "head" else None
            if engine is not None:
                engine.nodes = [name for name in sorted(workers) for _ in range(engine.ranks_per_pod)]
                self._sync_soon(uid)

    def _next_ip(self, uid: str) -> str:
        if uid not in self._ips:
            self._num_ips += 1
            self._ips[uid] = pod_ip(self._num_ips)
        return self._ips[uid]

    async def _write_event(self, pod: Document, reason: str, message: str) -> None:
        meta = pod["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event: Document = {
            "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
            "involvedObject": {"kind": "Pod", "apiVersion": "v1"}
            | {key: meta[key] for key in ("namespace", "name", "uid")},
            "reason": reason,
            "message": message,
            "type": "Warning",
            "source": {"component": "kubelet"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self._api.request("POST", f"/api/v1/namespaces/{meta['namespace']}/events", event)


def _service_of(pod: Document) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"].get("labels", {}).get(SERVICE_LABEL, "")


def _adapters_of(config: Document) -> dict[str, str] | None:
    """Name -> folder of the adapters with which an engine starts; None if nobody may change them."""
    if not config.get("managed_adapters"):
        return None
    return {name: path for name, _, path in (each.partition("=") for each in config["adapters"])}
