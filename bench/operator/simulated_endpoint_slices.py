"""A simulated EndpointSlice controller. The real one limits itself to 20 requests a second.

It writes one slice for each service and adds pods to it. It never removes a pod.
"""

from __future__ import annotations

from real_api_server.traffic import SLICE_LABEL
from simulated_controller import SimulatedController
from simulated_nodes.api_client import Api, Document
from simulated_nodes.gateways import SERVICE_LABEL

_ROUTE = "rayloom.dev/route=true"
_APPLY = "application/apply-patch+yaml"


class EndpointSlices(SimulatedController):
    """The controller, in one event loop."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self._ready: dict[tuple[str, str], dict[str, str]] = {}  # (namespace, service) -> uid -> address

    async def _follow(self) -> None:
        async for _, pod in self._api.follow("/api/v1/pods", labelSelector=_ROUTE):
            meta, ip = pod["metadata"], pod["status"].get("podIP")
            key = meta["namespace"], meta["labels"][SERVICE_LABEL]
            ready = self._ready.setdefault(key, {})
            if ip and meta["uid"] not in ready:
                ready[meta["uid"]] = ip
                self._begin(self._write(*key, dict(ready)))

    async def _write(self, namespace: str, service: str, pods: dict[str, str]) -> None:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices/{service}-abc"
        found: Document = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{service}-abc", "labels": {SLICE_LABEL: service, SERVICE_LABEL: service}},
            "addressType": "IPv4",
            "endpoints": [
                {"addresses": [ip], "conditions": {"ready": True}, "targetRef": {"kind": "Pod", "uid": uid}}
                for uid, ip in pods.items()
            ],
        }
        async with self._slots:
            await self._api.request("PATCH", path, found, content_type=_APPLY, fieldManager="standin", force="true")
