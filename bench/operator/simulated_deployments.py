"""A simulated Deployment controller and scheduler. The real ones limit themselves to 20 requests a second.

It creates the pods of each Deployment once, on simulated nodes. A changed Deployment only gets a new status.
"""

from __future__ import annotations

from simulated_controller import SimulatedController
from simulated_nodes.api_client import MERGE, Api, Document
from simulated_nodes.gateways import SERVICE_LABEL


class Deployments(SimulatedController):
    """The controller, in one event loop."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self._seen: dict[str, int] = {}  # uid -> generation

    async def _follow(self) -> None:
        async for kind, found in self._api.follow("/apis/apps/v1/deployments", labelSelector=SERVICE_LABEL):
            meta = found["metadata"]
            if kind == "DELETED":
                self._seen.pop(meta["uid"], None)
            elif self._seen.get(meta["uid"]) != meta["generation"]:
                is_new = meta["uid"] not in self._seen
                self._seen[meta["uid"]] = meta["generation"]
                self._begin(self._roll_out(found, is_new=is_new))

    async def _roll_out(self, deployment: Document, *, is_new: bool) -> None:
        meta, number = deployment["metadata"], deployment["spec"]["replicas"]
        counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), number)
        path = f"/apis/apps/v1/namespaces/{meta['namespace']}/deployments/{meta['name']}/status"
        status = {"status": counts | {"observedGeneration": meta["generation"]}}
        owner = deployment | {"apiVersion": "apps/v1", "kind": "Deployment"}  # objects in a list have no kind
        async with self._slots:
            for index in range(number if is_new else 0):
                await self._make_pod(owner, f"{meta['name']}-{index}", deployment["spec"]["template"], index)
            await self._api.request("PATCH", path, status, content_type=MERGE)
