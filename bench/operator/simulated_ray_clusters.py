"""A simulated KubeRay and scheduler, since the real KubeRay would take too long for thousands of services.

It creates the pods of each RayCluster once, on simulated nodes. Kubernetes' own garbage collector deletes the pods.
"""

from __future__ import annotations

from simulated_controller import SimulatedController
from simulated_nodes.api_client import Api, ApiError, Document
from simulated_nodes.nodes import NODES


class RayClusters(SimulatedController):
    """The controller, in one event loop."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self._made: set[str] = set()  # uids

    async def _follow(self) -> None:
        async for kind, found in self._api.follow("/apis/ray.io/v1/rayclusters"):
            uid = found["metadata"]["uid"]
            if kind == "DELETED":
                self._made.discard(uid)
            elif uid not in self._made:
                self._made.add(uid)
                self._begin(self._make_pods(found))

    async def _make_pods(self, cluster: Document) -> None:
        spec = cluster["spec"]
        groups = [("head", "headgroup", spec["headGroupSpec"]["template"], 1)]
        groups += [
            ("worker", each["groupName"], each["template"], each["replicas"]) for each in spec["workerGroupSpecs"]
        ]
        async with self._slots:
            for node_type, group, template, number in groups:
                for index in range(number):
                    await self._make_pod(cluster, node_type, group, template, index)

    async def _make_pod(self, cluster: Document, node_type: str, group: str, template: Document, index: int) -> None:
        meta = cluster["metadata"]
        owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": meta["name"], "uid": meta["uid"]}
        labels = {"ray.io/cluster": meta["name"], "ray.io/node-type": node_type, "ray.io/group": group}
        pod = {
            "metadata": {
                "name": f"{meta['name']}-{node_type}-{index}",
                "labels": template["metadata"]["labels"] | labels,
                "ownerReferences": [owner | {"controller": True, "blockOwnerDeletion": True}],
            },
            "spec": template["spec"] | {"nodeName": NODES[index % len(NODES)]},
        }
        try:
            await self._api.request("POST", f"/api/v1/namespaces/{meta['namespace']}/pods", pod)
        except ApiError as error:
            if error.code != 409:
                raise
