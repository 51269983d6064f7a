"""Writes the status of services, and the Events about what is new in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from rayloom_operator.api.spec import API_VERSION, KIND
from rayloom_operator.api.status import Status, stored_rollout
from rayloom_operator.decide.events import events
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import NOT_FOUND, Kube, KubeError, Recreated
from rayloom_operator.kube.packed import PackedDict
from rayloom_operator.kube.reflector import without_managed_fields
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.reconcile.known import Known
from rayloom_operator.reconcile.write_pace import WritePace
from rayloom_operator.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# (document, is_deleted) of a service that is other than it was thought to be.
OnService = Callable[[Manifest, bool], None]
# A service whose spec has changed.
OnEdit = Callable[[ServiceKey], None]


class StatusWriter:
    """Lives in one event loop. `services` are those that are known; what is written is put there at once."""

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
        self._metrics = metrics
        self._on_service, self._on_edit = on_service, on_edit
        self._pace = WritePace()
        self._untold: dict[ServiceKey, dict[str, Manifest]] = {}  # Events that are to be made, by name

    def forget(self, key: ServiceKey) -> None:
        """The service is gone."""
        self._pace.forget(key)
        self._untold.pop(key, None)

    async def write(self, key: ServiceKey, document: Manifest, computed: Status) -> float | None:
        """Writes the status of the service in `document` where it is another one.

        Gives after how many seconds to come again with what may not be written yet; None where nothing is left.
        """
        content = computed.model_dump(mode="json", by_alias=True, exclude_none=True)
        previous = document.get("status", {})
        if content == previous:
            return None
        wait_s = self._pace.wait_s(key, previous, content, asyncio.get_running_loop().time())
        if wait_s > 0:
            return wait_s
        meta = document["metadata"]
        before = [each["reason"] for each in previous.get("conditions", ())]
        if before != [each.reason for each in computed.conditions]:
            said = ", ".join(f"{each.type}={each.status}/{each.reason}" for each in computed.conditions)
            logger.info("%s/%s: %s", *key, said)
        which = {each: meta[each] for each in ("name", "namespace", "uid")}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": which, "status": content}
        try:
            written = await self._kube.replace_status(manifest)
        except (KubeError, Recreated) as error:
            if isinstance(error, KubeError) and error.code != NOT_FOUND:
                raise
            # kopf does not say so when that happened while its watch was broken.
            if self._services.mark(key) == Known.of(document):
                self._on_service(document, True)
            if isinstance(error, Recreated):
                logger.info("%s/%s: was deleted and made anew", *key)
                self._on_service(error.found, False)
            return None
        known, version = self._services.mark(key), int(written["metadata"]["resourceVersion"])
        # Also where the spec has changed meanwhile: what is remembered of failures is in it.
        if known and known.uid == meta["uid"] and known.version < version:
            self._services[key] = without_managed_fields(written)
            if written["metadata"]["generation"] != meta["generation"]:
                # The event of that edit, which is older than this, will be no news.
                self._on_edit(key)
        if computed.rollout is not None:
            self._metrics.rolled(stored_rollout(previous), computed.rollout, datetime.now(UTC))
        news = {each["metadata"]["name"]: each for each in events(document, computed, datetime.now(UTC))}
        self._untold.setdefault(key, {}).update(news)
        return None

    async def tell(self, key: ServiceKey) -> bool:
        """Makes the Events that are to be made; False when some are left for the next pass, for want of an answer."""
        untold = self._untold.pop(key, {})
        for name, event in list(untold.items()):
            try:
                await self._kube.create(event)
            except KubeError as error:
                logger.warning("%s/%s: the event %s was refused: %s", *key, event["reason"], error)
            except OperatorError as error:
                logger.warning("%s/%s: the event %s comes later: %s", *key, event["reason"], error)
                self._untold.setdefault(key, {})[name] = event
        return key not in self._untold
