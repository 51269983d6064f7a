"""A copy of all objects of one kind that belong to LLMServices, kept by one list and a watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from rayloom_operator.kube import Kube, KubeError, KubeUnreachable
from rayloom_operator.names import SERVICE_LABEL, Manifest, ServiceKey, object_path

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
_LIVED_S = 1.0  # a watch that ends sooner is a failure, whatever it says
_OF_SERVICES = {"labelSelector": SERVICE_LABEL}
_GONE = 410  # the version to watch from is too old


def service_of(found: Manifest) -> ServiceKey:
    """The service that an object belongs to by its label."""
    return found["metadata"]["namespace"], found["metadata"]["labels"][SERVICE_LABEL]


def without_managed_fields(found: Manifest) -> Manifest:
    """A third of an object, and of no use to us."""
    found["metadata"].pop("managedFields", None)
    return found


class Reflector:
    """`on_change` gets the key of the service whose object came, changed or went. Objects are not to be changed.

    `selector` says which objects, `key_of` what each belongs to (its LLMService), `slim` what is kept of it.
    """

    def __init__(
        self,
        kube: Kube,
        api_version: str,
        kind: str,
        on_change: Callable[[ServiceKey], None],
        *,
        selector: Mapping[str, str] = _OF_SERVICES,
        key_of: Callable[[Manifest], ServiceKey] = service_of,
        slim: Callable[[Manifest], Manifest] = without_managed_fields,
    ) -> None:
        self._kube = kube
        self._path = object_path(api_version, kind)
        self._on_change = on_change
        self._selector = selector
        self._key_of = key_of
        self._slim = slim
        self._of_service: dict[ServiceKey, dict[str, Manifest]] = {}  # service -> name -> object
        self.is_synced = asyncio.Event()  # set once everything was listed

    def of_service(self, key: ServiceKey) -> list[Manifest]:
        """The objects of one service, by name."""
        objects = self._of_service.get(key, {})
        return [objects[name] for name in sorted(objects)]

    async def run(self) -> None:
        """Follows the cluster for ever. A server that is away is asked again, ever more slowly."""
        delay = _FIRST_DELAY_S
        version = ""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                if not version:
                    version = await self._list()
                async for kind, found in self._kube.watch(self._path, self._selector, version):
                    version = found["metadata"]["resourceVersion"]
                    self._take(kind, found)
            except KubeError as error:
                version = ""
                logger.log(logging.INFO if error.code == _GONE else logging.WARNING, "%s: %s", self._path, error)
            except KubeUnreachable as error:
                logger.warning("%s", error)
            # The server ends each watch after a while; the next one goes on from there.
            if loop.time() - began > _LIVED_S:
                delay = _FIRST_DELAY_S
            else:
                await asyncio.sleep(delay)
                delay = min(2 * delay, _MAX_DELAY_S)

    async def _list(self) -> str:
        items, version = await self._kube.list(self._path, self._selector)
        before = {(key, name) for key, objects in self._of_service.items() for name in objects}
        for found in items:
            before.discard((self._key_of(found), found["metadata"]["name"]))
            self._take("ADDED", found)
        for key, name in before:
            self._take("DELETED", self._of_service[key][name])
        self.is_synced.set()
        return version

    def _take(self, kind: str, found: Manifest) -> None:
        if kind == "BOOKMARK":
            return
        key, name = self._key_of(found), found["metadata"]["name"]
        objects = self._of_service.setdefault(key, {})
        if kind == "DELETED":
            objects.pop(name, None)
            if not objects:
                del self._of_service[key]
        else:
            objects[name] = self._slim(found)
        self._on_change(key)
