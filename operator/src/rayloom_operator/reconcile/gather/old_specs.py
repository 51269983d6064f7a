"""Reads the specs of earlier revisions that a rollout needs, from their ControllerRevisions."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.errors import NotAllowed
from rayloom_operator.kube.client import NOT_FOUND, Kube, KubeError
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.objects.old_spec import old_spec_path, resolved_of
from rayloom_operator.objects.ownership import is_owned
from rayloom_operator.reconcile.gather.sizer import Sizer
from rayloom_operator.resolve.resolved import Hub, Resolved

logger = logging.getLogger(__name__)


class OldSpecs:
    """Reads the old specs of services, and caches them while a rollout needs them.

    Not thread-safe: used in one event loop.
    """

    def __init__(self, kube: Kube, hub: Hub, permissions: Permissions, sizer: Sizer) -> None:
        self._kube = kube
        self._hub = hub
        self._permissions = permissions
        self._sizer = sizer
        self._known: dict[ServiceKey, dict[str, Resolved]] = {}

    async def of(self, key: ServiceKey, document: Manifest, revisions: Iterable[str]) -> dict[str, Resolved]:
        """Returns revision -> spec, for those of `revisions` whose spec exists and can be read.

        Removes all other revisions of the service from the cache.
        """
        before = self._known.pop(key, {})
        found = {}
        for revision in revisions:
            resolved = before.get(revision) or await self._read(key, document, revision)
            if resolved is not None and resolved.service.metadata.uid == document["metadata"]["uid"]:
                found[revision] = resolved
        if found:
            self._known[key] = found
        return found

    def forget(self, key: ServiceKey) -> None:
        """Drops everything that is kept of a deleted service."""
        self._known.pop(key, None)

    async def _read(self, key: ServiceKey, document: Manifest, revision: str) -> Resolved | None:
        path = old_spec_path(*key, revision)
        try:
            found = await self._kube.get(path)
        except KubeError as error:
            if error.code != NOT_FOUND:
                raise
            logger.warning("%s/%s: %s is gone: no engine of that revision can be recreated", *key, path)
            return None
        if not is_owned(found["metadata"], document["metadata"]["uid"]):
            return None
        # `resolved_of` runs in the sizing thread, because it sizes the spec again if the stored sizing has other
        # inputs. The inputs may differ if another version of the operator stored the sizing, or if a user changed the
        # ControllerRevision.
        resolved = await self._sizer.run(resolved_of, found, document, self._hub)
        if resolved is None:
            logger.warning("%s/%s: %s cannot be read: no engine of that revision can be recreated", *key, path)
            return None
        try:
            # Checked again, because somebody may have changed the operator's settings or the ControllerRevision.
            self._permissions.check(resolved.service)
        except NotAllowed as error:
            logger.warning("%s/%s: no engine of %s can be recreated: %s", *key, path, error)
            return None
        return resolved
