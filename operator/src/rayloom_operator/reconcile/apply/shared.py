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
from rayloom_operator.objects.secret_digest import has_digest, without_digest
from rayloom_operator.observe.drift import ListedObjects
from rayloom_operator.reconcile.apply.writer import ObjectWriter


class Failures(NamedTuple):
    """The failed writes of Secrets, and those of other objects."""

    secrets: list[OperatorError]
    others: list[OperatorError]


class SharedObjects:
    """Writes shared objects. Not thread-safe: used in one event loop."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer
        self._with_digest: set[ServiceKey] = set()  # services with an object that may have a digest in the cluster

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted service."""
        self._with_digest.discard(key)

    def note_listed(self, key: ServiceKey, listed: ListedObjects) -> None:
        """Notes whether an object that existed before this process has a digest."""
        if any(each.has_digest for each in listed.values()):
            self._with_digest.add(key)

    async def write(
        self, key: ServiceKey, due: Sequence[Manifest], new: frozenset[str], *, is_digest_new: bool
    ) -> Failures:
        """Writes each object, even if other writes fail, and returns the failures.

        `new`: as in Plan. `is_digest_new`: the Secrets in `due` may differ from those in the cluster.

        Raises KubeUnreachable or Deposed, because every further request would fail, too.
        """
        secrets = [each for each in due if each["kind"] == "Secret"]
        holders = [each for each in due if has_digest(each)]
        # The pods of a Deployment need the ServiceAccount and the Secrets, so it is written last.
        deployments = [each for each in due if each["kind"] == "Deployment"]
        others = [each for each in due if each["kind"] not in ("Secret", "Deployment") and not has_digest(each)]
        failed = Failures([], [])

        async def write_secrets() -> None:
            found = await self._write_secrets(key, secrets, holders, new, is_digest_new=is_digest_new)
            failed.secrets.extend(found.secrets)
            failed.others.extend(found.others)

        async def write_others() -> None:
            failed.others.extend(await self._write_each(key, others, new))

        await all_of((write_secrets(), write_others()))
        failed.others.extend(await self._write_each(key, deployments, new))
        return failed

    async def _write_secrets(
        self,
        key: ServiceKey,
        secrets: Sequence[Manifest],
        holders: Sequence[Manifest],
        new: frozenset[str],
        *,
        is_digest_new: bool,
    ) -> Failures:
        """Writes the Secrets, and then the object with their digest. If a Secret fails, the digest is empty."""
        if secrets and is_digest_new and key in self._with_digest:
            # The old digest must not outlive the old Secrets. Otherwise, if the operator was killed between the two
            # writes, and the next operator wanted the old Secrets again, it would believe that they are there. A
            # failure is not reported here: the same object is written once more below.
            await self._empty_digest(key, holders, new)
        failed = await self._write_each(key, secrets, new)
        if failed:
            return Failures(failed, await self._empty_digest(key, holders, new))
        if holders:
            self._with_digest.add(key)
        return Failures([], await self._write_each(key, holders, new))

    async def _empty_digest(
        self, key: ServiceKey, holders: Sequence[Manifest], new: frozenset[str]
    ) -> list[OperatorError]:
        failed = await self._write_each(key, map(without_digest, holders), new)
        if holders and not failed:
            self._with_digest.discard(key)
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
