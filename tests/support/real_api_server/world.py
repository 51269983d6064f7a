"""The world of a test on an API server without real nodes: a client, simulated nodes and engines, and operators.

world.create({...})                             applies a manifest with the checks of `kubectl apply`
world.play(ns, "chat", "head", Play(...))       sets the behaviour of the service's head pods from now on
world.engine(ns, "chat", token_age=20.0)        sets fields of the service's engine
world.ship("acme/engine:2", Release(...))       sets the behaviour of engines of this image
with world.traffic(ns, "chat") as traffic:      clients send requests to the service
world.wait(ns, "chat", "Available", "Serving")  returns the condition once it has this reason
world.operator()                                returns a running operator
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from local_kubernetes.install import NAMESPACE
from operator_processes.chart import credentials
from operator_processes.process import PATIENCE_S, Credentials, OperatorProcess, wait_for, wait_until
from operator_processes.proxy import Connections, Proxy
from real_api_server.history import History
from real_api_server.traffic import SLICE_LABEL, Traffic, ready_addresses
from simulated_nodes.api_client import Api, ApiError, Document
from simulated_nodes.engines import Engine, Engines
from simulated_nodes.gateways import SERVICE_LABEL, Gateway
from simulated_nodes.kubelets import Kubelets
from simulated_nodes.pod_status import Play, Release

LLM = "/apis/rayloom.dev/v1alpha1"
ENGINE_IMAGE = "rayloom/engine:test"
# Additions that the operator allows in pod templates; IPC_LOCK is the only capability.
IN_PODS = "hostIPC,hostNetwork,hostPorts,privileged,root,volumes,IPC_LOCK"
# A short window makes autoscaled services change within seconds.
DEFAULT_FLAGS = (
    f"--engine-image={ENGINE_IMAGE}",
    "--allow-host-paths=/models",
    f"--allow-in-pod-templates={IN_PODS}",
    "--autoscaling-window=10",
)
LEASE = (f"--lease-namespace={NAMESPACE}",)

_GROUPS = {
    "rayclusters": "/apis/ray.io/v1",
    "controllerrevisions": "/apis/apps/v1",
    "deployments": "/apis/apps/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
}

_T = TypeVar("_T")


class World:
    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig = kubeconfig
        self.services: dict[tuple[str, str], Document] = {}  # copies of the API server's present objects
        self.seen: set[tuple[str, str, str]] = set()  # (type, status, reason) of all conditions so far
        # service -> (type, reason) -> all such conditions in order, without duplicates
        self._past_conditions: dict[tuple[str, str], dict[tuple[str, str], list[Document]]] = {}
        self.history = History()
        self._drain_records: set[asyncio.Task[None]] = set()
        self._folder = folder
        self._numbers = itertools.count()
        self._operators: list[OperatorProcess] = []
        self._credentials: Credentials | None = None
        # Half of this process's CPU time goes into TLS and sockets. asyncio's own loop handles them in Python, and
        # uvloop in C.
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="simulated-nodes", daemon=True).start()
        self.do(self._start())

    async def _start(self) -> None:
        self.api = Api(self.kubeconfig)
        self._connections = Connections(self.kubeconfig)
        self.engines = Engines()
        self.kubelets = Kubelets(self.api, self.engines)
        self.engines.on_drain = lambda ip: self._drain_records.add(asyncio.create_task(self._record_drain(ip)))
        await self.engines.start()
        await self.kubelets.start()
        self._following = [asyncio.create_task(each) for each in (self._follow(), self.history.follow(self.api))]

    async def _follow(self) -> None:
        async for kind, found in self.api.follow(f"{LLM}/llmservices"):
            key = found["metadata"]["namespace"], found["metadata"]["name"]
            if kind == "DELETED":
                self.services.pop(key, None)
                continue
            self.services[key] = found
            for each in found.get("status", {}).get("conditions", ()):
                self.seen.add((each["type"], each["status"], each["reason"]))
                past = self._past_conditions.setdefault(key, {}).setdefault((each["type"], each["reason"]), [])
                if each not in past:
                    past.append(each)

    async def _record_drain(self, ip: str) -> None:
        """Sets `found_at_drain`: the ways by which clients still reach an engine when it gets the drain request."""
        pod, engine = self.kubelets.pod_at(ip), self.engines.by_ip[ip]
        assert pod is not None
        meta = pod["metadata"]
        path, service = f"/api/v1/namespaces/{meta['namespace']}", meta["labels"][SERVICE_LABEL]
        labels = (await self.api.request("GET", f"{path}/pods/{meta['name']}"))["metadata"]["labels"]
        path = path.replace("/api/v1", "/apis/discovery.k8s.io/v1")
        slices = await self.api.request("GET", f"{path}/endpointslices", labelSelector=f"{SLICE_LABEL}={service}")
        is_listed = any(ip in ready_addresses(each) for each in slices["items"])
        found = {"route": labels.get("rayloom.dev/route") == "true", "endpoint": is_listed}
        engine.found_at_drain = tuple(way for way, is_open in found.items() if is_open)

    def close(self) -> None:
        self.stop_operators()
        self.do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _close(self) -> None:
        for each in self._following:
            each.cancel()
        await self.kubelets.close()
        await self.engines.close()
        await self.api.close()
        await self._connections.close()
        # Requests that still wait in a proxy belong to operators that have ended.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def do(self, work: Coroutine[Any, Any, _T], timeout_s: float = PATIENCE_S) -> _T:
        """Runs the coroutine in the event loop of the simulated nodes, and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def request(self, method: str, path: str, body: object = None, **options: str) -> Document:
        """The API server's answer. Raises ApiError."""
        return self.do(self.api.request(method, path, body, **options))

    def get(self, path: str) -> Document | None:
        """The object; None when it does not exist."""
        try:
            return self.request("GET", path)
        except ApiError as error:
            if error.code != 404:
                raise
            return None

    def delete(self, path: str) -> None:
        """Deletes the object. Does nothing if the object does not exist or is being deleted."""
        try:
            self.request("DELETE", path, {"propagationPolicy": "Background"})
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def create(self, manifest: Document) -> Document:
        """Applies an LLMService like `kubectl apply`, which refuses unknown fields. Raises ApiError."""
        meta = manifest["metadata"]
        return self.request(
            "PATCH",
            f"{LLM}/namespaces/{meta['namespace']}/llmservices/{meta['name']}",
            manifest,
            content_type="application/apply-patch+yaml",
            fieldManager="test",
            force="true",
            fieldValidation="Strict",
        )

    def objects(self, namespace: str, service: str, *plurals: str) -> dict[str, Document]:
        """kind/name -> object, for all objects of a service except pods. `plurals`: only objects of these kinds."""
        found: dict[str, Document] = {}
        for plural in plurals or ("services", "serviceaccounts", "configmaps", "secrets", *_GROUPS):
            path = f"{_GROUPS.get(plural, '/api/v1')}/namespaces/{namespace}/{plural}"
            answer = self.request("GET", path, labelSelector=f"rayloom.dev/service={service}")
            kind = answer["kind"].removesuffix("List")
            found |= {f"{kind}/{each['metadata']['name']}": each for each in answer["items"]}
        return found

    def pods(self, namespace: str, service: str) -> list[Document]:
        answer = self.request(
            "GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=f"rayloom.dev/service={service}"
        )
        return [each for each in answer["items"] if "deletionTimestamp" not in each["metadata"]]

    def play(self, namespace: str, service: str, role: str, play: Play) -> None:
        self.do(_called(lambda: self.kubelets.play(namespace, service, role, play)))

    def ship(self, image: str, release: Release) -> None:
        """Sets the behaviour of engines of this image that start from now on."""
        self.do(_called(lambda: self.kubelets.release(image, release)))

    def engines_of(self, namespace: str, service: str) -> dict[str, Engine]:
        """RayCluster -> running engine, for all of the service's engines."""
        return self.do(_called(lambda: self.kubelets.engines(namespace, service)))

    def gateways_of(self, namespace: str, service: str) -> dict[str, Gateway]:
        """Name of a pod -> running gateway, for all of the service's gateways."""
        return self.do(_called(lambda: self.kubelets.gateways(namespace, service)))

    @contextlib.contextmanager
    def traffic(self, namespace: str, service: str, per_s: float = 10.0, seconds: float = 0.3) -> Iterator[Traffic]:
        """Clients that send requests once the service has an endpoint. The block ends when all requests have ended."""
        traffic = Traffic(self.api, self.engines, namespace, service, per_s=per_s, seconds=seconds)
        self.do(_called(traffic.start))
        try:
            yield traffic
        finally:
            self.do(traffic.close())

    def cordon(self, node: str) -> None:
        """Makes the node unschedulable. Returns at once."""
        self.do(self.kubelets.nodes.cordon(node))

    def uncordon(self, *nodes: str) -> None:
        """Makes the nodes schedulable again. Returns once pods may be placed on them."""
        for node in nodes:
            self.do(self.kubelets.nodes.cordon(node, False))
        self._wait_open(*nodes)

    def bring_back(self, node: str) -> None:
        """Restarts a lost node. Returns once pods may be placed on it."""
        self.do(self.kubelets.bring_back(node))
        self._wait_open(node)

    def _wait_open(self, *nodes: str) -> None:
        # The node controller removes a taint shortly after its cause has gone.
        for node in nodes:
            wait_until(lambda node=node: self.do(self.kubelets.nodes.is_open(node)), f"no taint of {node}")

    def evict(self, pod: Document) -> bool:
        """Evicts the pod like `kubectl drain`. Returns False if a PDB refused, True if the pod is gone."""
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/eviction"
        names = {"name": meta["name"], "namespace": meta["namespace"]}
        try:
            self.request("POST", path, {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": names})
        except ApiError as error:
            if error.code not in (404, 429):
                raise
            return error.code == 404
        return True

    def newest_engine(self, namespace: str, service: str, cluster: str = "") -> Engine:
        """Waits for the newest engine of the service, or for the engine of a RayCluster, and returns it."""

        def found() -> Engine | None:
            return self.do(_called(lambda: self.kubelets.engine(namespace, service, cluster)))

        return wait_for(found, f"the engine of {service}", story=self.story)

    def engine(self, namespace: str, service: str, cluster: str = "", **fields: object) -> None:
        """Waits for the newest engine of the service, or for the engine of a RayCluster, and sets its fields."""
        self.change(self.newest_engine(namespace, service, cluster), **fields)
        self.do(_called(lambda: self.kubelets.changed(namespace, service)))

    def change(self, simulated: Engine | Gateway, **fields: object) -> None:
        """Sets all `fields` of an engine or a gateway together, so that no answer has only some of the changes."""

        def go() -> None:
            for name, value in fields.items():
                setattr(simulated, name, value)

        self.do(_called(go))

    def condition(self, namespace: str, service: str, kind: str) -> Document:
        """The condition; empty while it does not exist."""
        found = self.services.get((namespace, service), {}).get("status", {}).get("conditions", ())
        return next((each for each in found if each["type"] == kind), {})

    def wait(self, namespace: str, service: str, kind: str, reason: str, says: str = "") -> Document:
        """Waits until the condition has this reason, and `says` in its message. Returns the condition of that moment.

        A message may change later than the reason.
        """

        def matching() -> Document | None:
            found = self.condition(namespace, service, kind)
            return found if found.get("reason") == reason and says in found["message"] else None

        def story() -> str:
            status = self.services.get((namespace, service), {}).get("status")
            return f"{json.dumps(status, indent=1)}\n{self.story()}"

        return wait_for(matching, f"{namespace}/{service}: {kind} with reason {reason} {says!r}", story=story)

    def wait_seen(self, namespace: str, service: str, kind: str, reason: str, says: str = "") -> Document:
        """Waits until the condition has or had this reason, with `says` in its message. Returns the last of these."""
        conditions = self._past_conditions.setdefault((namespace, service), {})

        def found() -> list[Document]:
            return [each for each in list(conditions.get((kind, reason), ())) if says in each["message"]]

        return wait_for(
            found,
            f"{namespace}/{service}: {kind} with reason {reason} {says!r}",
            story=lambda: f"seen: {sorted(conditions)} {conditions.get((kind, reason))}\n{self.story()}",
        )[-1]

    def wait_serving(self, namespace: str, service: str) -> None:
        """Returns once the service is Available with its present spec."""
        generation = self.request("GET", f"{LLM}/namespaces/{namespace}/llmservices/{service}")["metadata"][
            "generation"
        ]

        def is_so() -> bool:
            found = self.condition(namespace, service, "Available")
            return bool(found.get("status") == "True" and found["observedGeneration"] == generation)

        wait_until(
            is_so,
            f"{namespace}/{service} to serve",
            story=lambda: (
                json.dumps(self.services.get((namespace, service), {}).get("status"), indent=1) + self.story()
            ),
        )

    def wait_replaced(self, namespace: str, service: str, uids: set[str]) -> None:
        """Returns once none of the RayClusters with these uids exists, and all others serve.

        A wait for Available would not suffice, because the condition is still True immediately after the loss of an
        engine.
        """

        def is_so() -> bool:
            clusters = [each["metadata"] for each in self.objects(namespace, service, "rayclusters").values()]
            engines = self.engines_of(namespace, service)
            groups = self.services[(namespace, service)]["status"].get("groups", ())
            serving = {each["name"] for each in groups if each["state"] == "Serving"}
            return bool(clusters) and all(
                each["uid"] not in uids
                and each["name"] in serving
                and (engine := engines.get(each["name"])) is not None
                and engine.served_at is not None
                for each in clusters
            )

        wait_until(is_so, f"{namespace}/{service} to serve with other engines", story=self.story)
        self.wait_serving(namespace, service)

    def start_operator(
        self, *flags: str, is_held: bool = False, command: tuple[str, ...] | None = None
    ) -> OperatorProcess:
        """Starts another operator. `is_held`: the operator's first request waits until `release`."""
        proxy = self.do(Proxy.start(self._connections))
        if not is_held:
            self.release(proxy)
        folder = self._folder / f"operator-{next(self._numbers)}"
        flags = flags or DEFAULT_FLAGS
        if self._credentials is None:
            self._credentials = credentials(self.request)
        process = OperatorProcess(proxy, self._credentials, folder, "run", *flags, *LEASE, command=command)
        self._operators.append(process)
        return process

    def take_lease(self) -> None:
        """Deletes the leader's lease, so that the next operator need not wait for its expiry."""
        leases = "/apis/coordination.k8s.io/v1/namespaces/rayloom-system/leases"
        for each in self.request("GET", leases)["items"]:
            self.delete(f"{leases}/{each['metadata']['name']}")

    def release(self, proxy: Proxy) -> None:
        self._loop.call_soon_threadsafe(proxy.is_open.set)

    def operator(self) -> OperatorProcess:
        """A running operator. If no operator runs, starts one with the default flags."""
        for process in self._operators:
            if process.is_alive:
                return process
        return self.start_operator()

    def stop_operators(self) -> None:
        """Kills all operators. The next operator reads its credentials again from the installed chart."""
        self._credentials = None
        for process in self._operators:
            process.kill()
            self.do(process.proxy.close())
        self._operators.clear()

    def story(self) -> str:
        last = self._operators[-2:]
        waiting = [(each.method, each.path) for one in last for each in one.proxy.log if each.is_waiting]
        return "\n".join(process.story() for process in last) + f"\nunanswered: {waiting}"


async def _called(call: Callable[[], _T]) -> _T:
    """Makes the call in the event loop that runs this coroutine, and returns its result."""
    return call()
