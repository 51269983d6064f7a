"""A client of the Kubernetes API with an administrator's certificate: JSON requests, and endless watches."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

Document = dict[str, Any]

MERGE = "application/merge-patch+json"
_GONE = 410
# With these codes the API server refuses a request without carrying it out, so the client may repeat the request.
_FOR_THE_MOMENT = (429, 503)
_NUM_REPEATS = 60
_REPEAT_S = 0.5


class ApiError(Exception):
    """The API server refused a request. `code` is the HTTP status; the message is the server's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Api:
    """A client for one event loop, in which it must be created."""

    def __init__(self, kubeconfig: Path) -> None:
        self.server = cluster_of(kubeconfig)["server"]
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls(kubeconfig), limit=0))

    async def close(self) -> None:
        await self.session.close()

    async def request(
        self, method: str, path: str, body: object = None, *, content_type: str = "application/json", **params: str
    ) -> Document:
        """The parsed answer. Raises ApiError.

        Like client-go, the client repeats a request that the API server refuses temporarily, for example while the
        storage of a CRD is replaced. A PodDisruptionBudget refuses an eviction with the same code, but the client does
        not repeat an eviction.
        """
        data = None if body is None else json.dumps(body)
        for _ in range(_NUM_REPEATS):
            try:
                return await self._request(method, path, data, content_type, params)
            except ApiError as error:
                if error.code not in _FOR_THE_MOMENT or path.endswith("/eviction"):
                    raise
            await asyncio.sleep(_REPEAT_S)
        return await self._request(method, path, data, content_type, params)

    async def _request(
        self, method: str, path: str, data: str | None, content_type: str, params: dict[str, str]
    ) -> Document:
        async with self.session.request(
            method,
            self.server + path,
            params=params,
            data=data,
            headers={"Content-Type": content_type},
            timeout=aiohttp.ClientTimeout(total=60),
        ) as response:
            text = await response.text()
            if response.status >= 400:
                raise ApiError(response.status, _message_of(text))
            answer: Document = json.loads(text)
            return answer

    async def follow(self, path: str, **params: str) -> AsyncIterator[tuple[str, Document]]:
        """Yields (type, object): ADDED for each existing object, and then every event, endlessly.

        After a broken watch, yields ADDED again for each existing object, and DELETED for objects that were deleted in
        between.
        """
        known: dict[str, Document] = {}  # uid -> object
        while True:
            try:
                found = await self.request("GET", path, **params)
                existing = {item["metadata"]["uid"] for item in found["items"]}
                for uid in known.keys() - existing:
                    yield "DELETED", known.pop(uid)
                for item in found["items"]:
                    known[item["metadata"]["uid"]] = item
                    yield "ADDED", item
                version = found["metadata"]["resourceVersion"]
                while True:
                    async for kind, item in self._watch(path, version, params):
                        version = item["metadata"]["resourceVersion"]
                        if kind == "BOOKMARK":
                            continue
                        if kind == "DELETED":
                            known.pop(item["metadata"]["uid"], None)
                        else:
                            known[item["metadata"]["uid"]] = item
                        yield kind, item
            except (ApiError, aiohttp.ClientError, TimeoutError, ValueError):
                # ValueError: the watch has ended in the middle of an event.
                await asyncio.sleep(0.2)

    async def _watch(self, path: str, version: str, params: dict[str, str]) -> AsyncIterator[tuple[str, Document]]:
        # The timeout is short, because a watch of a removed CRD may stay silent.
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": "20"}
        query |= params
        timeout = aiohttp.ClientTimeout(total=None)
        async with self.session.get(self.server + path, params=query, timeout=timeout) as response:
            if response.status >= 400:
                raise ApiError(response.status, await response.text())
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError(event["object"].get("code", _GONE), event["object"].get("message", ""))
                    yield event["type"], event["object"]


def cluster_of(kubeconfig: Path) -> Document:
    """The cluster entry of a local cluster's kubeconfig, which is JSON."""
    found: Document = json.loads(kubeconfig.read_text())["clusters"][0]["cluster"]
    return found


def tls(kubeconfig: Path, *, with_client: bool = True) -> ssl.SSLContext:
    """A TLS context for the API server of this kubeconfig, with or without the certificate of its user."""
    authority = cluster_of(kubeconfig)["certificate-authority-data"]
    context = ssl.create_default_context(cadata=_decoded(authority).decode())
    if not with_client:
        return context
    user = json.loads(kubeconfig.read_text())["users"][0]["user"]
    with tempfile.TemporaryDirectory() as folder:
        certificate = Path(folder, "certificate")
        key = Path(folder, "key")
        certificate.write_bytes(_decoded(user["client-certificate-data"]))
        key.write_bytes(_decoded(user["client-key-data"]))
        context.load_cert_chain(certificate, key)
    return context


def _message_of(text: str) -> str:
    """The message of an error. The API server answers in plain text for a kind that does not exist."""
    try:
        return str(json.loads(text).get("message", ""))
    except ValueError:
        return text


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)
