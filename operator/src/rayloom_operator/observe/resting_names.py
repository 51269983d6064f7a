"""Keeps the names of deleted RayClusters reserved for 60 s, so that no new RayCluster gets such a name at once.

KubeRay remembers a RayCluster by name for some time, and would mistake a new RayCluster of that name for the deleted
RayCluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from rayloom_operator.kube.client import NOT_FOUND, Kube, KubeError
from rayloom_operator.kube.reflector import Reflector
from rayloom_operator.names import GROUP_LABEL, ServiceKey, object_path
from rayloom_operator.objects.ownership import is_owned

_REST_S = 60.0


class RestingNames:
    """The reserved names, called resting. Not thread-safe: used in one event loop.

    `clusters` and `pods` are the watches of RayClusters and of their pods.
    """

    def __init__(self, kube: Kube, clusters: Reflector, pods: Reflector) -> None:
        self._kube = kube
        self._clusters = clusters
        self._pods = pods
        # name of a RayCluster -> time at which it was first found missing; None while it exists
        self._gone_at: dict[ServiceKey, dict[str, datetime | None]] = {}

    def note(self, key: ServiceKey, name: str) -> None:
        """Notes that a RayCluster of this name was created.

        So the name stays reserved even if the RayCluster is deleted before the watch has seen it.
        """
        self._gone_at.setdefault(key, {})[name] = None

    def resting(self, key: ServiceKey) -> set[str]:
        """Returns the names that are reserved."""
        return {name for name, at in self._gone_at.get(key, {}).items() if at is not None}

    async def forget(self, key: ServiceKey, now: datetime) -> float | None:
        """Keeps the names of a deleted service reserved for a while.

        Returns the seconds until `forget` has to be called again, or None once no name is reserved any more.
        """
        await self.find_gone(key, "", (), now)
        if self._gone_at[key]:
            return _REST_S
        del self._gone_at[key]
        return None

    async def find_gone(self, key: ServiceKey, uid: str, remembered: Iterable[str], now: datetime) -> None:
        """Notes which RayClusters of the service with this uid were deleted since the last call.

        The first call also looks for `remembered`, the names in the service's status. Every call looks for the
        RayClusters that existing pods name, because pods may outlive their RayCluster.
        """
        known = self._gone_at.setdefault(key, dict.fromkeys(remembered))
        for pod in self._pods.of_service(key):
            name = pod["metadata"]["labels"].get(GROUP_LABEL)
            if name is not None:
                known.setdefault(name, None)
        await self._ask(key, uid, known, now)
        for name, at in list(known.items()):
            if at is not None and now - at > timedelta(seconds=_REST_S):
                del known[name]
        known |= dict.fromkeys(self._names(key))

    async def _ask(self, key: ServiceKey, uid: str, known: dict[str, datetime | None], now: datetime) -> None:
        """Asks the API server about each known RayCluster that the watch does not list. Notes the deleted RayClusters.

        Repeats until each of these RayClusters exists or is noted as gone, because the watch may change meanwhile.
        """
        existing: set[str] = set()
        while missing := {name for name, at in known.items() if at is None} - self._names(key) - existing:
            for name in missing:
                # The watch does not list a RayCluster whose label was removed. Such a RayCluster still exists, and gets
                # the label back when a RayCluster of its name is applied.
                if await self._exists(key, name, uid):
                    existing.add(name)
                else:
                    known[name] = now

    def _names(self, key: ServiceKey) -> set[str]:
        return {each["metadata"]["name"] for each in self._clusters.of_service(key)}

    async def _exists(self, key: ServiceKey, name: str, uid: str) -> bool:
        try:
            found = await self._kube.get(object_path("ray.io/v1", "RayCluster", key[0], name))
        except KubeError as error:
            return error.code != NOT_FOUND
        return is_owned(found["metadata"], uid) and "deletionTimestamp" not in found["metadata"]
