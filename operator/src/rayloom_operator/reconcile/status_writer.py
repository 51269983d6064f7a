"""Writes the status of services, and creates Kubernetes Events about its changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from rayloom_operator.api.spec import API_VERSION, KIND
from rayloom_operator.api.status import Status, stored_autoscaling, stored_rollout
from rayloom_operator.decide.events import events
from rayloom_operator.decide.scaling.inputs import SCALER
from rayloom_operator.kube.client import NOT_FOUND, Kube, KubeError, Recreated
from rayloom_operator.kube.packed import PackedDict
from rayloom_operator.kube.reflector import without_managed_fields
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.reconcile.event_sender import EventSender
from rayloom_operator.reconcile.known import Known
from rayloom_operator.reconcile.write_pace import WritePace
from rayloom_operator.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# The operator reads the rollout state from the status. If the API server drops the rollout state, no engine is created,
# replaced or deleted.
_OLD_DEFINITION = (
    "the CustomResourceDefinition is older than the operator, and no engine is created, replaced or deleted before it "
    "is updated: apply crds/llmservices.rayloom.dev.yaml, or upgrade the chart"
)

# Called with (document, is_deleted) if a write shows that a service was deleted or recreated.
OnService = Callable[[Manifest, bool], None]
# Called with a service whose spec was edited after the reconcile began.
OnEdit = Callable[[ServiceKey], None]


class StatusWriter:
    """Writes each status that has changed, at a limited rate, and the Events about the change.

    Not thread-safe: used in one event loop. `services` are the known services. A written status is stored there at
    once.
    """

    def __init__(
        self,
        kube: Kube,
        services: PackedDict[ServiceKey, Known],
        metrics: Metrics,
        on_service: OnService,
        on_edit: OnEdit,
    ) -> None:
        self._kube = kube
        self._services = services
        self.metrics = metrics
        self._on_service = on_service
        self._on_edit = on_edit
        self._pace = WritePace()
        self._events = EventSender(kube)

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted service."""
        self._pace.forget(key)
        self._events.forget(key)
        self.metrics.scaling.forget(key)

    async def write(self, key: ServiceKey, document: Manifest, computed: Status) -> float | None:
        """Writes the status `computed`, if it differs from the status in `document`.

        Returns the seconds until `WritePace` allows the write; None if nothing is left to write.
        """
        content = computed.model_dump(mode="json", by_alias=True, exclude_none=True)
        previous = document.get("status", {})
        if content == previous:
            return None
        wait_s = self._pace.wait_s(key, previous, content, asyncio.get_running_loop().time())
        if wait_s > 0:
            return wait_s
        _log_conditions(key, previous, computed)
        written = await self._replace(key, document, content)
        if written is None:
            return None
        if written.get("status", {}).get("rollout") != content.get("rollout"):
            logger.error("%s/%s: the API server dropped fields of status.rollout: %s", *key, _OLD_DEFINITION)
        self._note_written(key, document, written)
        now = datetime.now(UTC)
        if computed.rollout is not None:
            self.metrics.rolled(stored_rollout(previous), computed.rollout.state(), now)
        if computed.autoscaling is not None:
            replicas = document["spec"].get("replicas", 1)
            state = computed.autoscaling.state()
            self.metrics.scaling.changed(stored_autoscaling(previous), state, replicas, SCALER)
        self._events.add(key, events(document, computed, now))
        return None

    async def send_events(self, key: ServiceKey) -> bool:
        """Creates the Events that are not created yet. Returns False if some have to be retried."""
        return await self._events.send(key)

    async def _replace(self, key: ServiceKey, document: Manifest, content: Manifest) -> Manifest | None:
        """Replaces the status in the cluster. Returns the written service; None if the service of this uid is gone."""
        meta = document["metadata"]
        identity = {each: meta[each] for each in ("name", "namespace", "uid")}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": identity, "status": content}
        try:
            return await self._kube.replace_status(manifest)
        except Recreated as error:
            self._note_gone(key, document)
            logger.info("%s/%s: was deleted and recreated", *key)
            self._on_service(error.found, False)
        except KubeError as error:
            if error.code != NOT_FOUND:
                raise
            self._note_gone(key, document)
        return None

    def _note_gone(self, key: ServiceKey, document: Manifest) -> None:
        # A missing object is handled like the event of its deletion, because kopf reports no deletion that happened
        # while its watch was broken.
        if self._services.mark(key) == Known.of(document):
            self._on_service(document, True)

    def _note_written(self, key: ServiceKey, document: Manifest, written: Manifest) -> None:
        """Stores the written service, even if its spec was edited meanwhile: only the written service has the newest
        status."""
        meta = document["metadata"]
        known = self._services.mark(key)
        version = int(written["metadata"]["resourceVersion"])
        if known is None or known.uid != meta["uid"] or known.version >= version:
            return
        self._services[key] = without_managed_fields(written)
        if written["metadata"]["generation"] != meta["generation"]:
            # `set_service` will ignore the event of that edit, because the event is older than the stored service.
            self._on_edit(key)


def _log_conditions(key: ServiceKey, previous: Manifest, computed: Status) -> None:
    before = [each["reason"] for each in previous.get("conditions", ())]
    if before != [each.reason for each in computed.conditions]:
        conditions = ", ".join(f"{each.type}={each.status}/{each.reason}" for each in computed.conditions)
        logger.info("%s/%s: %s", *key, conditions)
