"""A history of the RayClusters that a watch reports, so that tests can assert bounds that hold at every moment."""

from __future__ import annotations

from collections import defaultdict

from simulated_nodes.api_client import Api, Document
from simulated_nodes.gateways import SERVICE_LABEL

Key = tuple[str, str]  # (namespace, service)


class History:
    """A history that one event loop writes. Any thread may read it."""

    def __init__(self) -> None:
        self.clusters: dict[Key, dict[str, Document]] = defaultdict(dict)  # names of existing RayClusters
        self.ever: dict[Key, list[str]] = defaultdict(list)  # names of all RayClusters so far, the oldest first
        self.most: dict[Key, int] = defaultdict(int)  # most simultaneous RayClusters; tests may reset it

    async def follow(self, api: Api) -> None:
        async for kind, found in api.follow("/apis/ray.io/v1/rayclusters"):
            meta = found["metadata"]
            key, name = (meta["namespace"], meta.get("labels", {}).get(SERVICE_LABEL, "")), meta["name"]
            if kind == "DELETED":
                self.clusters[key].pop(name, None)
                continue
            self.clusters[key][name] = found
            if name not in self.ever[key]:
                self.ever[key].append(name)
            self.most[key] = max(self.most[key], len(self.clusters[key]))
