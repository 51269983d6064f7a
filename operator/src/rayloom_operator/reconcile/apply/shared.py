"""Writes the objects that all engine replicas of a service share, or the objects of an LLMGateway.

An object with a digest of Secrets (`objects/secret_digest.py`) is written after these Secrets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import NamedTuple

from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import Deposed, KubeUnreachable
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.objects.secret_digest import digest_in, has_digest, without_digest
from rayloom_operator.observe.drift import ListedObjects
from rayloom_operator.reconcile.apply.writer import ObjectWriter

# The object may have any digest: it was not listed, or a write of it has failed, but the API server may have carried
# the write out.
_UNKNOWN = "unknown"


class Failures(NamedTuple):
    """The failed writes of Secrets, and those of other objects."""

    secrets: list[OperatorError]
    others: list[OperatorError]


class SharedObjects:
    """Writes shared objects. Not thread-safe: used in one event loop."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer
        # Service -> the digest that its object has in the cluster, or _UNKNOWN. No entry if the digest is empty.
        self._digests: dict[ServiceKey, str] = {}

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted service."""
        self._digests.pop(key, None)

    def note_listed(self, key: ServiceKey, listed: ListedObjects, *, is_complete: bool) -> None:
        """Notes the digest of an object that existed before this process.

        `is_complete`: all objects that may have a digest were listed.
        """
        found = {each.secrets_digest for each in listed.values()} - {""}
        if not is_complete:
            self._digests[key] = _UNKNOWN
        elif found:
            # A user may have copied the annotation to another object.
            self._digests[key] = found.pop() if len(found) == 1 else _UNKNOWN

    async def write(self, key: ServiceKey, due: Sequence[Manifest], new: frozenset[str]) -> Failures:
        """Writes each object, even if other writes fail, and returns the failures. `new`: as in Plan.

        Raises KubeUnreachable or Deposed, because every further request would fail, too.
        """
        secrets = [each for each in due if each["kind"] == "Secret"]
        holders = [each for each in due if has_digest(each)]
        # The pods of a Deployment need the ServiceAccount and the Secrets, so it is written last.
        deployments = [each for each in due if each["kind"] == "Deployment"]
        others = [each for each in due if each["kind"] not in ("Secret", "Deployment") and not has_digest(each)]
        failed = Failures([], [])

        async def write_secrets() -> None:
            found = await self._write_secrets(key, secrets, holders, new)
            failed.secrets.extend(found.secrets)
            failed.others.extend(found.others)

        async def write_others() -> None:
            failed.others.extend(await self._write_each(key, others, new))

        await all_of((write_secrets(), write_others()))
        failed.others.extend(await self._write_each(key, deployments, new))
        return failed

    async def _write_secrets(
        self, key: ServiceKey, secrets: Sequence[Manifest], holders: Sequence[Manifest], new: frozenset[str]
    ) -> Failures:
        """Writes the Secrets, and then the object with their digest. If a Secret fails, the digest is empty."""
        empty = [without_digest(each) for each in holders]
        stored = self._digests.get(key, "")
        if secrets and stored and any(digest_in(each) != stored for each in holders):
            # The old digest must not outlive the old Secrets. Otherwise, if the operator was killed between the two
            # writes, and the next operator wanted the old Secrets again, it would believe that they are there. A
            # failure is not reported here: the same object is written once more below.
            await self._write_holders(key, empty, new)
        failed = await self._write_each(key, secrets, new)
        return Failures(failed, await self._write_holders(key, empty if failed else holders, new))

    async def _write_holders(
        self, key: ServiceKey, holders: Sequence[Manifest], new: frozenset[str]
    ) -> list[OperatorError]:
        """Writes the object with a digest, and notes the digest. Returns the failures."""
        failed: list[OperatorError] = []
        for each in holders:
            digest = digest_in(each)
            if self._digests.get(key, "") != digest:
                self._digests[key] = _UNKNOWN  # until the API server has answered that it has written the object
            found = await self._write_each(key, [each], new)
            failed += found
            if found:
                continue
            if digest:
                self._digests[key] = digest
            else:
                self._digests.pop(key, None)
        return failed

    async def _write_each(
        self, key: ServiceKey, manifests: Iterable[Manifest], new: frozenset[str]
    ) -> list[OperatorError]:
        """Writes all objects at once. Returns the failures."""
        failed: list[OperatorError] = []

        async def attempt(manifest: Manifest) -> None:
            try:
                await self._writer.write(key, manifest, is_new=manifest["metadata"]["name"] in new)
            except (KubeUnreachable, Deposed):
                raise
            except OperatorError as error:
                failed.append(error)

        await all_of(attempt(each) for each in manifests)
        return failed


async def all_of(steps: Iterable[Awaitable[None]]) -> None:
    """Waits until all `steps` have ended, and then raises the first failure."""
    for failure in await asyncio.gather(*steps, return_exceptions=True):
        if failure is not None:
            raise failure
