"""The base of the simulated controllers: a watch, and a bounded number of writes at a time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine

from simulated_nodes.api_client import Api, ApiError, Document
from simulated_nodes.nodes import NODES

_NUM_AT_ONCE = 16


class SimulatedController(ABC):
    """Runs `_follow` in one event loop. Subclasses implement `_follow` and start their writes by `_begin`."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._slots = asyncio.Semaphore(_NUM_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._begin(self._follow())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    @abstractmethod
    async def _follow(self) -> None:
        """Watches objects and begins the writes for each change, until the task is cancelled."""

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make_pod(
        self, owner: Document, name: str, template: Document, index: int, labels: dict[str, str] | None = None
    ) -> None:
        """Creates a pod from the `template` of its controller `owner`, on a simulated node. The pod may exist already.

        `labels`: further labels. `index`: number of the pod among those with this template.
        """
        meta = owner["metadata"]
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"]}
        pod = {
            "metadata": {
                "name": name,
                "labels": template["metadata"]["labels"] | (labels or {}),
                "annotations": template["metadata"].get("annotations", {}),
                "ownerReferences": [reference | {"controller": True, "blockOwnerDeletion": True}],
            },
            "spec": template["spec"] | {"nodeName": NODES[index % len(NODES)]},
        }
        try:
            await self._api.request("POST", f"/api/v1/namespaces/{meta['namespace']}/pods", pod)
        except ApiError as error:
            if error.code != 409:
                raise
