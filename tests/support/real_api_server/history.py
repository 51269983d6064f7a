"""What RayClusters there were, seen by a watch: bounds hold at every moment, and not only where a test looks."""

from __future__ import annotations

from collections import defaultdict

from simulated_nodes.api_client import Api, Document
from simulated_nodes.kubelets import SERVICE_LABEL

Key = tuple[str, str]  # (namespace, service)


class History:
    """Filled in one event loop; may be read from anywhere."""

    def __init__(self) -> None:
        self.clusters: dict[Key, dict[str, Document]] = defaultdict(dict)  # those that are there, by name
        self.ever: dict[Key, list[str]] = defaultdict(list)  # the names of all that were, the oldest first
        self.most: dict[Key, int] = defaultdict(int)  # at once; a test begins anew with those that are there

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
