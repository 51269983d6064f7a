"""Notices when somebody else changes a Service, ServiceAccount, NetworkPolicy or PodDisruptionBudget of ours.

The version of an object after our last apply is compared with the version that a watch reports: another version is
drift. A restarted operator has applied nothing yet. It keeps a digest of each object that it lists until the first
reconcile of the service, which applies only the objects whose digest is not that of their manifest.

The digest is computed from the object's fields and not stored in an annotation: an annotation names the manifest that
was applied, and stays when somebody edits the object, so a NetworkPolicy that was opened while no operator ran would
stay open. Secrets and ConfigMaps are not watched, because the operator has no right to read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.reflector import Reflector, Watched, service_of
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.applied_fields import SHAPES, digest

_API_VERSIONS = {
    "Service": "v1",
    "ServiceAccount": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
}
# The first reconciles begin after so many seconds although a list is missing; they apply every object of that kind.
_LIST_S = 3.0


class Listed(NamedTuple):
    """An object that was there before the service's first reconcile."""

    uid: str
    version: str
    digest: int


# (kind, name) -> object
ListedObjects = dict[tuple[str, str], Listed]


class Drift:
    """Lives in one event loop, in which `reflectors` have to run.

    `on_change` gets the key of a service when the version of one of its objects is not that of our last apply.
    """

    def __init__(self, kube: Kube, on_change: Callable[[ServiceKey], None], *, namespaces: Sequence[str] = ()) -> None:
        self._on_change = on_change
        self._written: dict[ServiceKey, dict[str, str]] = {}  # uid -> version after our apply, or found right
        self._seen: dict[ServiceKey, dict[str, str]] = {}  # uid -> another version that was seen since; "" is deleted
        self._ours: dict[ServiceKey, dict[str, str]] = {}  # kind -> uid of our object, unchanged since it was written
        self._listed: dict[ServiceKey, ListedObjects] = {}  # of services before their first reconcile
        self.reflectors = tuple(VersionReflector(kube, kind, self._see, namespaces) for kind in SHAPES)

    async def listed(self) -> None:
        """Returns once every kind was listed, or its list failed, or after 3 s."""
        waits = [asyncio.create_task(each.was_tried.wait()) for each in self.reflectors]
        _, late = await asyncio.wait(waits, timeout=_LIST_S)
        for each in late:
            each.cancel()

    def wrote(self, key: ServiceKey, answer: Manifest) -> None:
        """Takes the API server's answer to an apply."""
        kind = answer["kind"]
        if kind in SHAPES:
            self._note_written(key, kind, answer["metadata"]["uid"], _version(kind, answer))

    def uid_of_ours(self, key: ServiceKey, kind: str) -> str | None:
        """Returns the uid of the service's object of this kind, of which there is one.

        None unless the object was applied or found right, and nobody else has changed it since.
        """
        return self._ours.get(key, {}).get(kind)

    def take_listed(self, key: ServiceKey) -> ListedObjects | None:
        """Returns the objects that were listed before the service's first reconcile; None after the first call."""
        if key in self._written:
            return None
        self._written[key] = {}
        return self._listed.pop(key, {})

    def is_right(self, key: ServiceKey, manifest: Manifest, listed: ListedObjects) -> bool:
        """Returns whether the manifest's object was listed with the fields of the manifest, and need not be applied."""
        kind = manifest["kind"]
        there = listed.get((kind, manifest["metadata"]["name"]))
        if there is None or there.digest != digest(kind, manifest):
            return False
        self._note_written(key, kind, there.uid, there.version)
        return True

    def take(self, key: ServiceKey) -> bool:
        """Returns whether somebody else has changed an object of the service since the last call."""
        written = self._written.get(key, {})
        # An object that this process has not written is no drift: the first reconcile compared or applied it.
        return any(written.get(uid, version) != version for uid, version in self._seen.pop(key, {}).items())

    def forget(self, key: ServiceKey) -> None:
        """Drops everything that is kept of a deleted service."""
        for each in (self._written, self._seen, self._ours, self._listed):
            each.pop(key, None)

    def _note_written(self, key: ServiceKey, kind: str, uid: str, version: str) -> None:
        self._written.setdefault(key, {})[uid] = version
        if self._seen.get(key, {}).get(uid, version) == version:
            self._ours.setdefault(key, {})[kind] = uid

    def _see(self, key: ServiceKey, kind: str, found: Manifest, is_gone: bool) -> None:
        name = found["metadata"]["name"]
        uid = found["metadata"]["uid"]
        version = "" if is_gone else _version(kind, found)
        if key not in self._written:
            if is_gone:
                self._listed.get(key, {}).pop((kind, name), None)
            else:
                self._listed.setdefault(key, {})[kind, name] = Listed(uid, version, digest(kind, found))
        if self._written.get(key, {}).get(uid) != version:
            self._seen.setdefault(key, {})[uid] = version
            # The next apply reads first whose object it is.
            self._ours.get(key, {}).pop(kind, None)
            self._on_change(key)


def _version(kind: str, found: Manifest) -> str:
    # A controller of Kubernetes writes the status of a budget, which changes its resourceVersion.
    field = "generation" if kind == "PodDisruptionBudget" else "resourceVersion"
    return str(found["metadata"].get(field, ""))


class VersionReflector(Reflector):
    """Calls `on_object` with each object instead of keeping a copy; (key, kind, object, whether it is gone).

    Also for objects that were deleted while there was no watch.
    """

    def __init__(
        self,
        kube: Kube,
        kind: str,
        on_object: Callable[[ServiceKey, str, Manifest, bool], None],
        namespaces: Sequence[str],
    ) -> None:
        watched = Watched(api_version=_API_VERSIONS[kind], kind=kind, shape=SHAPES[kind])
        super().__init__(kube, watched, lambda _: None, namespaces=namespaces)
        self._kind = kind
        self._on_object = on_object
        self._uids: dict[tuple[str, str], str] = {}  # by (namespace, name)

    def take(self, kind: str, found: Manifest) -> None:
        if kind == "BOOKMARK":
            return
        key = service_of(found)
        name = found["metadata"]["name"]
        uid = found["metadata"]["uid"]
        at = key[0], name
        before = self._key_at.get(at, key)
        # Its label may have been edited, or another object may have its name.
        if kind == "DELETED" or (before, self._uids.get(at, uid)) != (key, uid):
            self.drop(before, name)
        if kind != "DELETED":
            self._key_at[at] = key
            self._uids[at] = uid
            self._on_object(key, self._kind, found, False)

    def drop(self, key: ServiceKey, name: str) -> None:
        at = key[0], name
        if self._key_at.pop(at, None):
            self._on_object(key, self._kind, {"metadata": {"name": name, "uid": self._uids.pop(at)}}, True)
