"""Finds LLMServices whose deletion kopf has not reported.

When kopf's watch of LLMServices breaks, kopf lists them again and reports each service of that list. So kopf reports
every service that was created or changed in the meantime. But a service that was deleted in the meantime is not in the
list and gets no event. Without this module, the operator would still poll that service's engine replicas and count the
service in metrics.

So the operator lists the names of all services after 15 s and then every five minutes. A list shows the services at one
moment after the list request. If a service was known before the request and is not in the list, it was deleted.

If a service is deleted after that moment and its event is lost, the service is missing in the next list. A recreated
service has another uid, and kopf reports the new service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from rayloom_operator.api.spec import API_VERSION, KIND
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.shapes import NamedFields
from rayloom_operator.names import ServiceKey, object_path

logger = logging.getLogger(__name__)

# A list of 10,000 names takes 40 requests.
_INTERVAL_S = 300.0
# A service may be deleted after this process has listed the services and before kopf has listed them. kopf never
# reports such a service, and LLMGateways of its namespace wait for the report. So the first comparison comes early.
_FIRST_S = 15.0
_RETRY_S = 1.0


class MissedDeletions:
    """Compares the services of the cluster with the services that the operator knows.

    `known_uids` returns the uid of every known service. `on_deleted` is called with the key and uid of each deleted
    service. `on_deleted` must do nothing if the known service of that key has another uid by then.
    """

    def __init__(
        self,
        kube: Kube,
        namespaces: Sequence[str],
        known_uids: Callable[[], Mapping[ServiceKey, str]],
        on_deleted: Callable[[ServiceKey, str], None],
    ) -> None:
        self._kube = kube
        self._namespaces = namespaces or ("",)
        self._known_uids = known_uids
        self._on_deleted = on_deleted

    async def run(self) -> None:
        """Calls `compare` after 15 s and then every five minutes, until it is cancelled."""
        await asyncio.sleep(_FIRST_S)
        while True:
            await self.compare()
            await asyncio.sleep(_INTERVAL_S)

    async def compare(self) -> None:
        """Lists all services once and reports the deleted services."""
        known = dict(self._known_uids())
        listed = await self.list_uids()
        for key, uid in known.items():
            if listed.get(key) != uid:
                self._on_deleted(key, uid)

    async def list_uids(self) -> dict[ServiceKey, str]:
        """Returns the uid of every service in the served namespaces. Retries a failed list from its first page."""
        found: dict[ServiceKey, str] = {}
        for namespace in self._namespaces:
            while True:
                try:
                    found |= await self._list(namespace)
                    break
                except OperatorError as error:
                    logger.warning("LLMServices cannot be listed: %s; trying again", error)
                    await asyncio.sleep(_RETRY_S)
        return found

    async def _list(self, namespace: str) -> dict[ServiceKey, str]:
        found: dict[ServiceKey, str] = {}
        async for page, _ in self._kube.pages(object_path(API_VERSION, KIND, namespace), {}, NamedFields):
            for meta in (each["metadata"] for each in page):
                found[meta["namespace"], meta["name"]] = meta["uid"]
        return found
