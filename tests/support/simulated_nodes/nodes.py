"""Simulated Nodes of the API server: their status, their heartbeats and their cordons."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import aiohttp

from simulated_nodes.api_client import MERGE, Api, ApiError, Document

NODES = ("standin-a", "standin-b")
FAILURES = (ApiError, aiohttp.ClientError, TimeoutError)  # failures of a request
_LABEL = "rayloom.dev/standin"
# The node controller marks a node as unreachable 20 s after the last renewal of its lease.
_HEARTBEAT_S = 4.0
_CAPACITY = {
    "cpu": "100000",
    "memory": "1000000Gi",
    "ephemeral-storage": "1000000Gi",
    "pods": "100000",
    "nvidia.com/gpu": "8",
}


class Nodes:
    """The objects of all simulated nodes, and the names of lost nodes."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.lost: set[str] = set()

    async def start(self) -> None:
        """Creates the nodes with the condition Ready."""
        await asyncio.gather(*(self._make_node(name) for name in NODES))

    async def remove(self) -> None:
        for name in NODES:
            await self._api.request("DELETE", f"/api/v1/nodes/{name}")

    async def cordon(self, node: str, is_cordoned: bool = True) -> None:
        """Makes the node unschedulable, or schedulable again."""
        await self._api.request(
            "PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": is_cordoned}}, content_type=MERGE
        )

    async def is_open(self, node: str) -> bool:
        """True when pods may be placed on the node: the node controller has removed all taints."""
        return "taints" not in (await self._api.request("GET", f"/api/v1/nodes/{node}"))["spec"]

    async def report(self, name: str, ready: str) -> None:
        """Writes the status of a node. `ready`: the status of its condition Ready."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Ready", "status": ready, "reason": "StandIn", "message": "", "lastHeartbeatTime": now}
        status: dict[str, Any] = {
            "conditions": [condition | {"lastTransitionTime": now}],
            "capacity": _CAPACITY,
            "allocatable": _CAPACITY,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        }
        await self._api.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, content_type=MERGE)

    async def beat(self) -> None:
        """Keeps all nodes except lost nodes Ready, until the task is cancelled."""
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        while True:
            for name in NODES:
                if name in self.lost:
                    continue
                spec = {
                    "holderIdentity": name,
                    "leaseDurationSeconds": 40,
                    "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                }
                body = {"metadata": {"name": name, "namespace": "kube-node-lease"}, "spec": spec}
                try:
                    await self._renew(f"{path}/{name}", path, body)
                    await self._stay_ready(name)
                except FAILURES:
                    continue  # the next heartbeat is soon enough
            await asyncio.sleep(_HEARTBEAT_S)

    async def _make_node(self, name: str) -> None:
        labels = {_LABEL: "true", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        try:
            await self._api.request("POST", "/api/v1/nodes", node)
        except ApiError as error:
            if error.code != 409:
                raise
        await self.report(name, "True")

    async def _renew(self, path: str, leases: str, lease: Document) -> None:
        try:
            await self._api.request("PATCH", path, lease, content_type=MERGE)
        except ApiError as error:
            if error.code != 404:
                raise
            await self._api.request("POST", leases, lease)

    async def _stay_ready(self, name: str) -> None:
        """Reports a node as Ready again if the node controller found it unreachable while this process was paused."""
        conditions = (await self._api.request("GET", f"/api/v1/nodes/{name}"))["status"].get("conditions", ())
        is_ready = any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)
        if not is_ready and name not in self.lost:
            await self.report(name, "True")
