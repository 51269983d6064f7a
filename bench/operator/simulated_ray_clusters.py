"""A simulated KubeRay and scheduler, since the real KubeRay would take too long for thousands of services.

It creates the pods of each RayCluster once, on simulated nodes. Kubernetes' own garbage collector deletes the pods.
"""

from __future__ import annotations

from simulated_controller import SimulatedController
from simulated_nodes.api_client import Api, Document


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
        spec, name = cluster["spec"], cluster["metadata"]["name"]
        owner = cluster | {"apiVersion": "ray.io/v1", "kind": "RayCluster"}  # objects in a list have no kind
        groups = [("head", "headgroup", spec["headGroupSpec"]["template"], 1)]
        groups += [
            ("worker", each["groupName"], each["template"], each["replicas"]) for each in spec["workerGroupSpecs"]
        ]
        async with self._slots:
            for node_type, group, template, number in groups:
                labels = {"ray.io/cluster": name, "ray.io/node-type": node_type, "ray.io/group": group}
                for index in range(number):
                    await self._make_pod(owner, f"{name}-{node_type}-{index}", template, index, labels)
