"""A copy of the objects of one kind, kept up to date by a list and a watch: per namespace, or for the whole cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayloom_operator.kube.client import NOT_FOUND, Kube, KubeError, KubeUnreachable
from rayloom_operator.kube.packed import PackedDict
from rayloom_operator.names import LLMGATEWAY_LABEL, SERVICE_LABEL, Manifest, ServiceKey, object_path

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
# The delay if the API server does not know the kind, which may be installed at any time. The delay for an optional kind
# doubles up to the second value.
_UNKNOWN_DELAY_S = 2.0
_MAX_UNKNOWN_DELAY_S = 60.0
_LIVED_S = 1.0  # a watch that ends within this many seconds counts as a failure, even without an error
_GONE = 410  # the version to watch from is too old


def service_of(found: Manifest) -> ServiceKey:
    """Returns the key of the service to which an object belongs, read from the object's label."""
    meta = found["metadata"]
    # A service has a handful of objects. The names are interned, so that they are in memory only once per service.
    return sys.intern(meta["namespace"]), sys.intern(meta["labels"][SERVICE_LABEL])


def llmgateway_of(found: Manifest) -> ServiceKey:
    """Returns the LLMGateway that an object's label names."""
    meta = found["metadata"]
    return sys.intern(meta["namespace"]), sys.intern(meta["labels"][LLMGATEWAY_LABEL])


def own_key(found: Manifest) -> ServiceKey:
    """Returns namespace and name of the object itself."""
    meta = found["metadata"]
    return meta["namespace"], meta["name"]


def without_managed_fields(found: Manifest) -> Manifest:
    """Returns the object without `managedFields`. `managedFields` are a third of an object, and the operator reads them
    in no watched object.
    """
    found["metadata"].pop("managedFields", None)
    return found


def _with_service_label() -> Mapping[str, str]:
    return {"labelSelector": SERVICE_LABEL}


def _no_mark(_: Manifest) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A kind of objects that is watched, and the part of each object that is kept."""

    api_version: str
    kind: str
    selector: Mapping[str, str] = field(default_factory=_with_service_label)
    shape: Any = dict  # the TypedDict into which objects are decoded
    key_of: Callable[[Manifest], ServiceKey] = service_of
    slim: Callable[[Manifest], Manifest] = without_managed_fields  # returns the part of the decoded object that is kept
    mark: Callable[[Manifest], str] = _no_mark  # returns the value by which `Reflector.marked` finds the object
    # True: the CustomResourceDefinition of the kind may never be installed. The Reflector then lists the kind less and
    # less often. `Reflector.retry` lists it at once.
    is_optional: bool = False


class Reflector:
    """Lists and watches the objects of one kind and keeps a copy of each. Callers must not change the copies.

    `on_change` is called with the key of each object that was added, changed or deleted. Without `namespaces` the whole
    cluster is watched.
    """

    def __init__(
        self,
        kube: Kube,
        watched: Watched,
        on_change: Callable[[ServiceKey], None],
        *,
        namespaces: Sequence[str] = (),
    ) -> None:
        self._kube = kube
        self._watched = watched
        self._on_change = on_change
        self.path = object_path(watched.api_version, watched.kind)
        self._namespaces = {object_path(watched.api_version, watched.kind, each): each for each in namespaces or ("",)}
        self._objects: PackedDict[tuple[str, str], str] = PackedDict(watched.mark)  # (namespace, name) -> object
        self._key_at: dict[tuple[str, str], ServiceKey] = {}  # (namespace, name) -> key
        self._names: dict[ServiceKey, tuple[str, ...]] = {}  # key -> names, sorted
        self._unlisted = set(self._namespaces)  # paths that were not listed yet
        self._alive_at = dict.fromkeys(self._namespaces, 0.0)  # path -> loop time of the last answer or failure
        self.is_synced = asyncio.Event()  # every path was listed, and the API server knows the kind
        # `is_synced` is set, or the API server answered that it does not know the kind
        self.has_answered = asyncio.Event()
        self.was_tried = asyncio.Event()  # `has_answered` is set, or a list or watch failed
        self._kind_needed = asyncio.Event()  # set, and replaced, by each `retry`
        self._tasks: asyncio.TaskGroup
        self._following: list[asyncio.Task[None]] = []

    def of_service(self, key: ServiceKey) -> list[Manifest]:
        """Returns the objects of one key, sorted by name. While `is_synced` is not set, the copies may be old."""
        return [self._objects[key[0], name] for name in self._names.get(key, ())]

    def keys(self) -> list[ServiceKey]:
        """Returns the keys that have an object."""
        return list(self._names)

    def marked(self, mark: str) -> set[ServiceKey]:
        """Returns the keys that have an object with this mark. Unpacks nothing, so 20,000 objects take 1 ms."""
        return {self._key_at[at] for at in self._objects.marked(mark)}

    def silence_seconds(self, now: float) -> float:
        """Returns the longest time, over all paths, since a path's last answer or failure; `now` is the loop's time."""
        return now - min(self._alive_at.values())

    def retry(self) -> None:
        """Lists an unknown kind again at once, unless it was listed less than 2 s ago."""
        if asyncio.get_running_loop().time() - min(self._alive_at.values()) >= _UNKNOWN_DELAY_S:
            self._kind_needed.set()
            self._kind_needed = asyncio.Event()

    async def run(self) -> None:
        """Lists and watches until it is cancelled.

        While the API server does not answer, the delay between two requests grows.
        """
        async with asyncio.TaskGroup() as self._tasks:
            self._begin()

    async def relist(self) -> None:
        """Lists the objects again. Returns once all are listed, or once the API server says that the kind is unknown.

        May be called only while `run` runs. The watches are cancelled, and new watches begin at the new lists. If an
        old watch stayed, it could deliver an event that is younger than the list. The list would then undo this event.
        """
        for each in self._following:
            each.cancel()
        self._unlisted = set(self._namespaces)
        self.is_synced.clear()
        self.has_answered.clear()
        self._begin()
        await self.has_answered.wait()

    def _begin(self) -> None:
        self._following = [self._tasks.create_task(self._follow(path)) for path in self._namespaces]

    async def _follow(self, path: str) -> None:
        delay = _FIRST_DELAY_S
        unknown_delay = _UNKNOWN_DELAY_S
        version = ""
        loop = asyncio.get_running_loop()
        while True:
            began = math.inf  # loop time at which the watch began; infinity until it begins
            self._alive_at[path] = loop.time()
            try:
                if not version:
                    version = await self._list(path)
                    unknown_delay = _UNKNOWN_DELAY_S
                began = self._alive_at[path] = loop.time()
                async for kind, found in self._kube.watch(path, self._watched.selector, version, self._watched.shape):
                    self._alive_at[path] = loop.time()
                    version = found["metadata"]["resourceVersion"]
                    self.take(kind, found)
            except KubeError as error:
                version = ""
                if self._is_unknown(path, error):
                    await self._wait_for_kind(unknown_delay)
                    if self._watched.is_optional:
                        unknown_delay = min(2 * unknown_delay, _MAX_UNKNOWN_DELAY_S)
                    continue
            except KubeUnreachable as error:
                self.was_tried.set()
                logger.warning("%s", error)
            # The API server ends each watch after some minutes; the next watch begins at the last version.
            if loop.time() - began > _LIVED_S:
                delay = _FIRST_DELAY_S
            else:
                await asyncio.sleep(delay)
                delay = min(2 * delay, _MAX_DELAY_S)

    async def _wait_for_kind(self, most_s: float) -> None:
        """Returns after this many seconds, or at the next `retry`."""
        # not asyncio.wait_for: in Python 3.11 it swallows a cancellation in the tick in which the event is set
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._kind_needed.wait()

    def _is_unknown(self, path: str, error: KubeError) -> bool:
        """Logs a refused list or watch. Returns True if the API server does not know the kind."""
        self.was_tried.set()
        is_unknown = error.code == NOT_FOUND
        # Lists of an unknown kind are repeated often. So a refusal is logged once, and only if the kind was listed
        # before.
        if not is_unknown or path not in self._unlisted:
            logger.log(logging.INFO if error.code in (_GONE, NOT_FOUND) else logging.WARNING, "%s: %s", path, error)
        if is_unknown:
            # The objects may still exist. The copies stay until the API server knows the kind again and a list shows
            # which objects exist.
            self._unlisted.add(path)
            self.is_synced.clear()
            self.has_answered.set()
        return is_unknown

    async def _list(self, path: str) -> str:
        version = ""
        namespace = self._namespaces[path]
        missing = {(at, name) for at, name in self._key_at if namespace in ("", at)}
        async for items, page_version in self._kube.pages(path, self._watched.selector, self._watched.shape):
            version = page_version
            self._alive_at[path] = asyncio.get_running_loop().time()
            for found in items:
                missing.discard((self._watched.key_of(found)[0], found["metadata"]["name"]))
                self.take("ADDED", found)
        for at, name in missing:
            self.drop(self._key_at[at, name], name)
        self._unlisted.discard(path)
        if not self._unlisted:
            for each in (self.is_synced, self.has_answered, self.was_tried):
                each.set()
        return version

    def take(self, kind: str, found: Manifest) -> None:
        """Applies an event to the copies; each object of a list comes as an ADDED event."""
        if kind == "BOOKMARK":
            return
        key = self._watched.key_of(found)
        name = found["metadata"]["name"]
        at = key[0], name
        # An edited label moves the object to another service.
        before = self._key_at.get(at, key)
        if kind == "DELETED" or before != key:
            self.drop(before, name)
        if kind != "DELETED":
            self._key_at[at] = key
            self._objects[at] = self._watched.slim(found)
            names = self._names.get(key, ())
            if name not in names:
                self._names[key] = tuple(sorted((*names, name)))
            self._on_change(key)

    def drop(self, key: ServiceKey, name: str) -> None:
        """Removes the copy of an object that was deleted, or that belongs to another service now."""
        at = key[0], name
        self._objects.pop(at, None)
        self._key_at.pop(at, None)
        names = tuple(each for each in self._names.pop(key, ()) if each != name)
        if names:
            self._names[key] = names
        self._on_change(key)
