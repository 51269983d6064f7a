"""Writes the status of LLMGateways, and creates Kubernetes Events about its changes."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

from rayloom_operator.api.llmgateway.spec import KIND
from rayloom_operator.api.llmgateway.stored import LLMGatewayStatus
from rayloom_operator.api.spec import API_VERSION
from rayloom_operator.decide.events import condition_events
from rayloom_operator.kube.client import NOT_FOUND, Kube, KubeError, Recreated
from rayloom_operator.kube.reflector import without_managed_fields
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.reconcile.event_sender import EventSender
from rayloom_operator.reconcile.write_pace import WritePace

logger = logging.getLogger(__name__)


class GatewayStatusWriter:
    """Writes each status that has changed, at a limited rate. Not thread-safe: used in one event loop."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._pace = WritePace()
        self._events = EventSender(kube)
        self._written: dict[ServiceKey, Manifest] = {}  # the last written LLMGateway

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted LLMGateway."""
        self._pace.forget(key)
        self._events.forget(key)
        self._written.pop(key, None)

    def newest_status(self, key: ServiceKey, document: Manifest) -> Manifest:
        """Returns the status in `document`, or a later status that this process wrote: the watch may lag."""
        written, meta = self._written.get(key, document), document["metadata"]
        is_same = written["metadata"]["uid"] == meta["uid"]
        if is_same and int(written["metadata"]["resourceVersion"]) > int(meta["resourceVersion"]):
            document = written
        status: Manifest = document.get("status", {})
        return status

    async def write(self, key: ServiceKey, document: Manifest, computed: LLMGatewayStatus) -> float | None:
        """Writes the status `computed`, if it differs from the newest status.

        Returns the seconds until `WritePace` allows the write; None if nothing is left to write.
        """
        content = computed.model_dump(mode="json", by_alias=True, exclude_none=True)
        previous = self.newest_status(key, document)
        if content == previous:
            return None
        wait_s = self._pace.wait_s(key, previous, content, asyncio.get_running_loop().time())
        if wait_s > 0:
            return wait_s
        meta = document["metadata"]
        identity = {each: meta[each] for each in ("name", "namespace", "uid")}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": identity, "status": content}
        try:
            self._written[key] = without_managed_fields(await self._kube.replace_status(manifest))
        except Recreated:
            return None  # Another LLMGateway has this name now, and the watch reports it.
        except KubeError as error:
            if error.code != NOT_FOUND:
                raise
            return None
        conditions = ", ".join(f"{each.type}={each.status}/{each.reason}" for each in computed.conditions)
        logger.info("%s %s/%s: %s", KIND, *key, conditions)
        stored = {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "status": previous}
        self._events.add(key, condition_events(stored, computed.conditions, datetime.now(UTC)))
        return None

    async def send_events(self, key: ServiceKey) -> bool:
        """Creates the Events that are not created yet. Returns False if some have to be retried."""
        return await self._events.send(key)
