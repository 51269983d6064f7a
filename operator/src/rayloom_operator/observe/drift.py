"""Drift: somebody else has changed an object of ours that is watched (`applied_fields.SHAPES`).

An object has drifted if a watch reports another version of the object than the version of our last apply. A restarted
operator has applied nothing yet. So it keeps a digest of each listed object until the first reconcile of the object's
service. That reconcile applies only objects whose digest differs from the manifest's digest.

The digest is computed from the object's fields. A digest in an annotation would stay the same when somebody edits the
object. So a NetworkPolicy that somebody opened while no operator ran would stay open. Secrets and ConfigMaps are not
watched, because the operator has no right to read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.reflector import Reflector, Watched, llmgateway_of, service_of
from rayloom_operator.names import SERVICE_LABEL, Manifest, ServiceKey
from rayloom_operator.objects.gateway.route import HTTP_ROUTE, ROUTE_VERSIONS
from rayloom_operator.objects.secret_digest import digest_in
from rayloom_operator.observe.applied_fields import SHAPES, WATCHED_SHAPES, digest
from rayloom_operator.observe.deployments import Deployments
from rayloom_operator.observe.routes import Routes

_API_VERSIONS = {
    "Service": "v1",
    "ServiceAccount": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "Deployment": "apps/v1",
    **ROUTE_VERSIONS,
}
# Controllers write the status of these objects, which changes their resourceVersion but not their generation.
_WITH_STATUS = ("PodDisruptionBudget", "Deployment")
# The first reconciles wait at most this many seconds for the lists of all kinds. If the list of a kind is still
# missing after this time, the first reconciles apply every object of that kind.
_LIST_S = 3.0


class Listed(NamedTuple):
    """An object that existed before the service's first reconcile by this process."""

    uid: str
    version: str
    digest: int
    secrets_digest: str = ""  # digest of Secrets (`objects/secret_digest.py`); empty if the object has none


# (kind, name) -> object
ListedObjects = dict[tuple[str, str], Listed]


class Drift:
    """Finds the operator's objects that somebody else has changed.

    Not thread-safe: used in one event loop, in which the caller runs `reflectors`. `on_change` is called with the key
    of a service when one of its objects has another version than after our last apply. `label` selects the objects of
    services, or the objects of LLMGateways.
    """

    def __init__(
        self,
        kube: Kube,
        on_change: Callable[[ServiceKey], None],
        *,
        namespaces: Sequence[str] = (),
        label: str = SERVICE_LABEL,
    ) -> None:
        self._on_change = on_change
        self._written: dict[ServiceKey, dict[str, str]] = {}  # uid -> version after our apply, or in the first list
        # uid -> version that a watch reported later, if it differs from the version in `_written`; "" if deleted
        self._seen: dict[ServiceKey, dict[str, str]] = {}
        # (kind, name) -> uid of our object, until somebody else changes that object
        self._ours: dict[ServiceKey, dict[tuple[str, str], str]] = {}
        self._listed: dict[ServiceKey, ListedObjects] = {}  # only until a service's first reconcile
        self._waiting: dict[str, set[ServiceKey]] = {}  # kind unknown to the API server -> services that need it
        self.deployments = Deployments(on_change)
        self.routes = Routes(on_change)
        self._reflectors = {
            kind: VersionReflector(kube, kind, self._see, namespaces, label, self._kind_listed) for kind in SHAPES
        }
        self.reflectors = tuple(self._reflectors.values())

    async def listed(self) -> None:
        """Waits until each kind was listed or its list has failed, but for at most 3 s."""
        waits = [asyncio.create_task(each.was_tried.wait()) for each in self.reflectors]
        _, late = await asyncio.wait(waits, timeout=_LIST_S)
        for each in late:
            each.cancel()

    def is_listed(self, kind: str) -> bool:
        """Returns whether all objects of the kind were listed; False while a list is late or has failed."""
        return self._reflectors[kind].is_synced.is_set()

    def unknown_kinds(self) -> frozenset[str]:
        """Returns the kinds that the API server does not know."""
        return frozenset(
            kind
            for kind, each in self._reflectors.items()
            if each.has_answered.is_set() and not each.is_synced.is_set()
        )

    def need_kind(self, key: ServiceKey, kind: str) -> None:
        """Lists a kind that the API server does not know again, because the service needs an object of this kind.

        Once the API server knows the kind, `on_change` is called with the service.
        """
        if self._reflectors[kind].is_synced.is_set():  # the kind was listed after the caller had read `unknown_kinds`
            self._on_change(key)
            return
        self._waiting.setdefault(kind, set()).add(key)
        self._reflectors[kind].retry()

    def wrote(self, key: ServiceKey, answer: Manifest) -> None:
        """Notes the object that the API server returned for our apply."""
        kind = answer["kind"]
        if kind in SHAPES:
            meta = answer["metadata"]
            self._note_written(key, (kind, meta["name"]), meta["uid"], _version(kind, answer))

    def uid_of_ours(self, key: ServiceKey, kind: str, name: str) -> str | None:
        """Returns the uid of the service's object of this kind and name.

        Returns None until this process has applied the object, or has found that it equals its manifest (`is_right`).
        Also returns None if somebody else has changed the object since.
        """
        return self._ours.get(key, {}).get((kind, name))

    def take_listed(self, key: ServiceKey) -> ListedObjects | None:
        """Returns the objects that were listed before the service's first reconcile. Every later call returns None."""
        if key in self._written:
            return None
        self._written[key] = {}
        return self._listed.pop(key, {})

    def is_right(self, key: ServiceKey, manifest: Manifest, listed: ListedObjects) -> bool:
        """Returns whether `listed` contains the manifest's object with equal fields, so that no apply is needed.

        If so, records the object's version as our last write, so that only later versions count as drift.
        """
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        there = listed.get((kind, name))
        if there is None or there.digest != digest(kind, manifest):
            return False
        self._note_written(key, (kind, name), there.uid, there.version)
        return True

    def take(self, key: ServiceKey) -> bool:
        """Returns whether somebody else has changed an object of the service since the last call."""
        written, seen = self._written.get(key, {}), self._seen.pop(key, {})
        # An object that is not in `written` has not drifted: the service's first reconcile compared or applied it.
        is_drifted = any(written.get(uid, version) != version for uid, version in seen.items())
        for uid, version in seen.items():
            if not version:
                # The object was deleted or has lost its label. If it gets the label back, the apply after this drift
                # writes its version anew.
                written.pop(uid, None)
        return is_drifted

    def forget(self, key: ServiceKey) -> None:
        """Drops everything about a deleted service."""
        for each in (self._written, self._seen, self._ours, self._listed):
            each.pop(key, None)
        for keys in self._waiting.values():
            keys.discard(key)
        self.deployments.forget(key)
        self.routes.forget(key)

    def _note_written(self, key: ServiceKey, which: tuple[str, str], uid: str, version: str) -> None:
        self._written.setdefault(key, {})[uid] = version
        if self._seen.get(key, {}).get(uid, version) == version:
            self._ours.setdefault(key, {})[which] = uid

    def _kind_listed(self, kind: str) -> None:
        for key in self._waiting.pop(kind, ()):
            self._on_change(key)

    def _see(self, key: ServiceKey, kind: str, found: Manifest, is_gone: bool) -> None:
        if kind == "Deployment":
            self.deployments.see(key, found, is_gone)
        elif kind in ROUTE_VERSIONS:
            self.routes.see(key, kind, found, is_gone)
        name = found["metadata"]["name"]
        uid = found["metadata"]["uid"]
        version = "" if is_gone else _version(kind, found)
        if key not in self._written:
            if is_gone:
                self._listed.get(key, {}).pop((kind, name), None)
            else:
                there = Listed(uid, version, digest(kind, found), digest_in(found))
                self._listed.setdefault(key, {})[kind, name] = there
        if self._written.get(key, {}).get(uid) == version:
            # The event is about our last write, which has replaced the versions of earlier events. Two applies in quick
            # succession cause an event with the version of the first apply after the second was answered.
            self._seen.get(key, {}).pop(uid, None)
            return
        self._seen.setdefault(key, {})[uid] = version
        # Without an entry in `_ours`, the next apply first reads the object's owner.
        self._ours.get(key, {}).pop((kind, name), None)
        self._on_change(key)


def _version(kind: str, found: Manifest) -> str:
    meta = found["metadata"]
    if kind in ROUTE_VERSIONS:
        # A route's labels and annotations are settings, too, but a change of them does not change the route's
        # generation.
        marks = msgspec.json.encode([meta.get("labels"), meta.get("annotations")], order="sorted")
        return f"{meta.get('generation', '')} {hash(marks)}"
    field = "generation" if kind in _WITH_STATUS else "resourceVersion"
    return str(meta.get(field, ""))


class VersionReflector(Reflector):
    """Calls `on_object` for each event with (key, kind, object, whether the object was deleted). Keeps no copies.

    `on_object` is also called for objects that were deleted while no watch ran. `on_list` is called with the kind when
    every path was listed.
    """

    def __init__(
        self,
        kube: Kube,
        kind: str,
        on_object: Callable[[ServiceKey, str, Manifest, bool], None],
        namespaces: Sequence[str],
        label: str = SERVICE_LABEL,
        on_list: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._key_of = service_of if label == SERVICE_LABEL else llmgateway_of
        watched = Watched(
            api_version=_API_VERSIONS[kind],
            kind=kind,
            selector={"labelSelector": label},
            shape=WATCHED_SHAPES.get(kind, SHAPES[kind]),
            key_of=self._key_of,
            is_optional=kind == HTTP_ROUTE,
        )
        super().__init__(kube, watched, lambda _: None, namespaces=namespaces)
        self._kind = kind
        self._on_object = on_object
        self._on_list = on_list
        self._uids: dict[tuple[str, str], str] = {}  # (namespace, name) -> uid

    async def _list(self, path: str) -> str:
        version = await super()._list(path)
        if self.is_synced.is_set():
            self._on_list(self._kind)
        return version

    def take(self, kind: str, found: Manifest) -> None:
        if kind == "BOOKMARK":
            return
        key = self._key_of(found)
        name = found["metadata"]["name"]
        uid = found["metadata"]["uid"]
        at = key[0], name
        before = self._key_at.get(at, key)
        # The service label may have been edited, or a new object may have an earlier object's name. In both cases the
        # earlier object counts as deleted.
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
