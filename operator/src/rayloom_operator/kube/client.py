"""A client of the Kubernetes API: the few requests that the operator makes, as plain JSON over HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.codec import ListPage, WatchEvent, decoded, encoded
from rayloom_operator.kube.login import login
from rayloom_operator.names import FIELD_MANAGER, Manifest, path_of

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 16
_PAGE = "250"  # objects in a page of a list
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30)
# On a watch without events, the API server sends a bookmark each minute. A longer silence means a dead connection.
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=90)
_WATCH = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": "300"}
# Credentials are read again after this time. The kubelet replaces a service account's token long before the token
# expires.
_LOGIN_SECONDS = 300.0

_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

NOT_FOUND = 404
_UNREADABLE = 502  # 502 Bad Gateway: a proxy sends this code for an answer that it cannot read
CONFLICT = 409  # the name is taken, or the request gives another uid or version than the object has
INVALID = 422
# Both a taken name and a lost race have the code 409. A create loses a race if another client changes a ResourceQuota
# of the namespace at the same moment. The API server's message then begins with these words, and nothing was created.
_LOST_RACE = "Operation cannot be fulfilled"


class KubeError(OperatorError):
    """The API server refused a request. `code` is the HTTP status; the message is the server's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_other_uid(self) -> bool:
        """True if a patch or an apply gave a uid, and the object of that name has another uid."""
        return self.code == INVALID and "metadata.uid" in str(self)


class KubeUnreachable(OperatorError):
    """The API server gave no readable answer, but may have carried out the request."""


class Recreated(OperatorError):
    """Nothing was written. The object was deleted, and another object has its name now: `found`, with another uid."""

    def __init__(self, found: Manifest) -> None:
        super().__init__(f"{path_of(found)} was deleted and recreated")
        self.found = found


class Deposed(OperatorError):
    """Nothing was sent: this process may not write now, because another process may lead."""


class Kube:
    """A client for one event loop, in which it is created and used. Requests raise KubeError or KubeUnreachable.

    While `may_write` returns False, a request that would change the cluster raises Deposed. `on_request` is called with
    the verb and the status code of each request; the code is `none` if there was no answer.
    """

    def __init__(
        self,
        may_write: Callable[[], bool] = lambda: True,
        on_request: Callable[[str, str], object] = lambda verb, code: None,
    ) -> None:
        self.may_write = may_write
        self._on_request = on_request
        self._logged_in_at = time.monotonic()
        self._info = login()
        # A new connection costs this process and the API server more than a request, so requests wait for a free
        # connection.
        self._session = self._connect(_MAX_CONNECTIONS)
        self._watching = self._connect(0)  # no limit: a watch keeps its connection

    def _connect(self, max_connections: int) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._info.as_ssl_context(), limit=max_connections),
            # Compressing long lists costs the API server more than sending them.
            headers={"User-Agent": FIELD_MANAGER, "Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        await self._session.close()
        await self._watching.close()

    async def apply(self, manifest: Manifest, *, force: bool = True) -> Manifest:
        """Applies the object by server-side apply and returns the stored object.

        Without `force`, raises KubeError 409 if another field manager has set a field to another value.
        """
        how = "application/apply-patch+yaml"
        params = {"fieldManager": FIELD_MANAGER, "force": str(force).lower()}
        return _object(await self._send("PATCH", path_of(manifest), params=params, body=manifest, content_type=how))

    async def replace_status(self, manifest: Manifest) -> Manifest:
        """Replaces the object's status and returns the stored object. Raises Recreated if the object has another uid.

        The request is a JSON patch, because a JSON patch can test the uid. In a server-side apply to the status of a
        custom resource, the API server ignores the uid. Strict validation refuses a field that the cluster's
        CustomResourceDefinition lacks. Without strict validation the API server would drop the field, and a later
        reconcile would miss the field's value.
        """
        path, uid = path_of(manifest), manifest["metadata"]["uid"]
        steps = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "add", "path": "/status", "value": manifest["status"]},
        ]
        params = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        how = "application/json-patch+json"
        try:
            return _object(await self._send("PATCH", f"{path}/status", params=params, body=steps, content_type=how))
        except KubeError as error:
            # The API server gives this code for an invalid status as well as for another uid.
            if error.code != INVALID or (found := await self.get(path))["metadata"]["uid"] == uid:
                raise
            raise Recreated(found) from error

    async def scale(self, path: str, version: str, replicas: int, manager: str) -> None:
        """Sets `spec.replicas` of the object with this resourceVersion, as the field manager `manager`.

        Raises KubeError 422 if the object has another version by now.
        """
        steps: list[Manifest] = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": version},
            # "replace" would fail, because a Scale has no field `replicas` while the number is 0.
            {"op": "add", "path": "/spec/replicas", "value": replicas},
        ]
        how = "application/json-patch+json"
        await self._send("PATCH", f"{path}/scale", params={"fieldManager": manager}, body=steps, content_type=how)

    async def patch(self, path: str, body: Manifest) -> Manifest:
        """Patches the object with a JSON merge patch and returns the stored object."""
        return _object(await self._send("PATCH", path, body=body, content_type="application/merge-patch+json"))

    async def get(self, path: str) -> Manifest:
        return _object(await self._send("GET", path))

    async def create(self, manifest: Manifest) -> bool:
        """Creates the object and returns True; returns False if an object of that name exists.

        Raises KubeError 409 if nothing was created, although the name is free: a retry helps.
        """
        try:
            await self._send("POST", path_of(manifest).rsplit("/", 1)[0], body=manifest)
        except KubeError as error:
            if error.code != CONFLICT or str(error).startswith(_LOST_RACE):
                raise
            return False
        return True

    async def replace(self, manifest: Manifest) -> None:
        """Replaces an object's whole content, or creates the object if it is missing.

        Raises KubeError 409 if another client creates the object in between.

        The answer contains only the content that was sent. So the right to update an object is not a right to read it.
        """
        params = {"fieldManager": FIELD_MANAGER}
        try:
            await self._send("PUT", path_of(manifest), params=params, body=manifest)
        except KubeError as error:
            if error.code != NOT_FOUND:
                raise
            if not await self.create(manifest):
                # Another client has created the object in between, perhaps with other content.
                raise KubeError(CONFLICT, f"another client has just created {path_of(manifest)}; retry") from error

    async def delete(
        self, path: str, uid: str = "", *, grace_s: int | None = None, is_foreground: bool = False
    ) -> None:
        """Deletes the object. With a `uid`, deletes it only if it has this uid. A missing object is no error.

        With `is_foreground` the object stays, marked as terminating, until the objects that it owns are gone. With a
        `grace_s` of 0 a pod is removed without waiting for its kubelet.
        """
        policy = "Foreground" if is_foreground else "Background"
        options: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": policy}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._send("DELETE", path, body=options)
        except KubeError as error:
            if error.code not in (NOT_FOUND, CONFLICT):
                raise

    async def pages(
        self, path: str, params: Mapping[str, str], shape: Any = dict
    ) -> AsyncIterator[tuple[list[Manifest], str]]:
        """Yields the pages of a list, each with the resourceVersion to watch from.

        All pages belong to one snapshot. Raises KubeError 410 if the snapshot expires before the last page is read.
        Pages are used because all pods of 10,000 services at once would take a gigabyte. Objects are decoded into
        `shape`, a TypedDict.
        """
        more = ""
        while True:
            query = {**params, "limit": _PAGE} | ({"continue": more} if more else {})
            found: ListPage = _read(await self._send("GET", path, params=query, verb="list"), ListPage)
            more = found.metadata.get("continue", "")
            yield [_read(each, shape) for each in found.items or ()], found.metadata["resourceVersion"]
            if not more:
                return

    async def list(self, path: str, params: Mapping[str, str]) -> tuple[list[Manifest], str]:
        """Returns all objects and the resourceVersion to watch from. For short lists only, because all objects are in
        memory at once."""
        items = []
        version = ""
        async for page, at in self.pages(path, params):
            items += page
            version = at
        return items, version

    async def watch(
        self, path: str, params: Mapping[str, str], version: str, shape: Any = dict
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """Yields (type, object) of each event after `version` until the API server ends the watch.

        Raises KubeError 410 when `version` is too old.
        """
        query = {**params, **_WATCH, "resourceVersion": version}
        try:
            async with self._watching.get(
                self._info.server.rstrip("/") + path, params=query, headers=self._headers(), timeout=_WATCH_TIMEOUT
            ) as response:
                self._on_request("watch", str(response.status))
                if response.status >= 400:
                    raise _error(response.status, await response.read())
                rest = b""
                # The lines are split here and not by aiohttp, because an object may exceed aiohttp's limit for a line.
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        event: WatchEvent = decoded(line, WatchEvent)
                        if event.type == "ERROR":
                            status = decoded(event.object, dict)
                            raise KubeError(status.get("code", 500), status.get("message", ""))
                        yield event.type, decoded(event.object, shape)
        except (ValueError, RecursionError) as error:
            # The caller must list again: another watch from `version` would get the same unreadable event.
            raise KubeError(_UNREADABLE, f"an event of the watch of {path} cannot be read: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            self._on_request("watch", "none")
            raise KubeUnreachable(f"the watch of {path} broke: {type(error).__name__}: {error}") from error

    async def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Manifest | Sequence[Manifest] | None = None,
        content_type: str = "application/json",
        verb: str = "",
    ) -> bytes:
        verb = verb or _VERBS[method]
        content = None if body is None else _Content(encoded(body), self.may_write)
        try:
            for is_last in (False, True):
                async with self._session.request(
                    method,
                    self._info.server.rstrip("/") + path,
                    params=params,
                    data=content,
                    headers=self._headers() | {"Content-Type": content_type},
                    timeout=_REQUEST_TIMEOUT,
                ) as response:
                    text = await response.read()
                    self._on_request(verb, str(response.status))
                    if response.status == 401 and not is_last:
                        self._logged_in_at = float("-inf")
                        continue
                    if response.status >= 400:
                        raise _error(response.status, text)
                    return text
        except (aiohttp.ClientError, TimeoutError) as error:
            if content is not None and content.is_refused:
                raise Deposed(f"{method} {path}: not sent, because another process may lead") from error
            self._on_request(verb, "none")
            raise KubeUnreachable(f"{method} {path}: {type(error).__name__}: {error}") from error
        raise AssertionError("the last attempt returns or raises")

    def _headers(self) -> dict[str, str]:
        if time.monotonic() - self._logged_in_at > _LOGIN_SECONDS:
            self._logged_in_at = time.monotonic()
            try:
                self._info = login()
            except Exception as error:  # noqa: BLE001 - a half written kubeconfig fails in many ways
                logger.warning("new credentials cannot be read, the old ones are kept: %s", error)
        return self._info.as_http_headers()


class _Content(AsyncIterable[bytes]):
    """The body of a request that changes the cluster.

    aiohttp reads the body only once it has a connection. So a process that was suspended while it waited for a
    connection notices here that it does not lead any more. The API server ignores a request whose body is missing.
    """

    def __init__(self, content: bytes, may_write: Callable[[], bool]) -> None:
        self._content = content
        self._may_write = may_write
        self.is_refused = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if not self._may_write():
            self.is_refused = True
            raise ConnectionAbortedError("this process may not write")
        yield self._content


def _object(text: bytes) -> Manifest:
    found: Manifest = _read(text, dict)
    return found


def _read(text: bytes | msgspec.Raw, shape: Any) -> Any:
    try:
        return decoded(text, shape)
    except (ValueError, RecursionError) as error:
        raise KubeUnreachable(f"the API server's answer cannot be read: {error}") from error


def _error(code: int, text: bytes) -> KubeError:
    try:
        return KubeError(code, decoded(text, dict)["message"])
    except (ValueError, KeyError, TypeError):
        return KubeError(code, f"HTTP {code}: {text[:200].decode(errors='replace')}")
