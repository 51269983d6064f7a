"""Applies those objects of a plan that are due. An object is written after the objects that it needs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import Deposed, KubeUnreachable
from rayloom_operator.names import GROUP_LABEL, Manifest, ServiceKey
from rayloom_operator.objects.gateway.route import ROUTE_VERSIONS
from rayloom_operator.objects.old_spec import KIND_OF_OLD_SPECS
from rayloom_operator.objects.secret_digest import HOLDER_KINDS, has_digest
from rayloom_operator.observe.drift import Drift, ListedObjects
from rayloom_operator.reconcile.apply.refusals import as_refusal, most_urgent
from rayloom_operator.reconcile.apply.shared import SharedObjects, all_of
from rayloom_operator.reconcile.apply.writer import ObjectWriter

logger = logging.getLogger(__name__)

# The minimum number of seconds between two applies of all objects of a service.
_LEAST_S = 10.0
# These objects start pods, and the pods need all other objects. So RayClusters and Jobs are written last: if one
# exists, all objects that its pods need were created.
_LAST = ("RayCluster", "Job")
# Routes are written after RayClusters and Jobs. So a failed write of a route, for example because of an admission
# webhook, does not prevent the creation of engines.
_ROUTES = tuple(ROUTE_VERSIONS)
# The objects that belong to one engine replica, in the order of their creation.
_OF_REPLICAS = ("ConfigMap", "Secret")


class _Applied(NamedTuple):
    """The last plan of a service, as hashes. Stored manifests would take most of the operator's memory."""

    hashes: frozenset[int] = frozenset()
    at: float = 0.0  # event loop time at which all objects were applied last
    # All objects are applied again after this share of the interval. The first share is random, and every later share
    # is 1. Without the random share, the objects of all services that existed at the operator's start would be applied
    # at the same moments, every time.
    share: float = 1.0


class ObjectApplier:
    """Applies those objects of plans that are due. Not thread-safe: used in one event loop."""

    def __init__(self, drift: Drift, writer: ObjectWriter) -> None:
        self._drift = drift
        self._writer = writer
        self._shared = SharedObjects(writer)
        self._applied: dict[ServiceKey, _Applied] = {}
        self._route_refusals: dict[ServiceKey, str] = {}

    def route_refusal(self, key: ServiceKey) -> str:
        """Returns why the last write of a route failed; empty if that write succeeded."""
        return self._route_refusals.get(key, "")

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted service."""
        self._applied.pop(key, None)
        self._route_refusals.pop(key, None)
        self._shared.forget(key)
        self._writer.forget(key)
        self._drift.forget(key)

    async def apply(self, key: ServiceKey, planned: Plan, interval_s: float) -> None:
        """Applies the objects that were not in the service's last plan.

        Applies all objects of the plan in three cases: `interval_s` have passed since all objects were last applied,
        the last attempt failed, or somebody else changed an object. If a service existed when this process began to
        lead, the service's first reconcile applies only objects that are missing or differ from the plan.
        """
        now = asyncio.get_running_loop().time()
        listed = self._drift.take_listed(key)
        # The entry is removed now, and set again once all writes have succeeded. After an error there is no entry, so
        # all objects are due.
        before = self._applied.pop(key, _Applied())
        hashes = {hash(msgspec.json.encode(each)): each for each in planned.wanted}
        if listed is not None:
            self._shared.note_listed(key, listed, is_complete=all(map(self._drift.is_listed, HOLDER_KINDS)))
            right = self._find_right(key, hashes, planned.new, listed)
            before = _Applied(hashes=right, at=now, share=random.random())
        # A RayCluster or Job in the plan is always due: it is planned only while it does not exist.
        new = [each for number, each in hashes.items() if number not in before.hashes or each["kind"] in _LAST]
        if new:
            self._log(key, new)
        after_s = max(interval_s * before.share, min(interval_s, _LEAST_S))
        is_all = self._is_drifted(key, planned) or not before.hashes or now - before.at >= after_s
        due = planned.wanted if is_all else new
        await self._write(key, due, planned.new)
        if is_all and listed is None:
            before = _Applied(at=now)
        if self.route_refusal(key):
            # Routes whose write failed stay due, so that each reconcile tries them again.
            hashes = {number: each for number, each in hashes.items() if each["kind"] not in _ROUTES}
        self._applied[key] = before._replace(hashes=frozenset(hashes))

    def _log(self, key: ServiceKey, new: Sequence[Manifest]) -> None:
        # Each reconcile tries a refused route again. A line for each try would fill the log.
        logged = [each for each in new if each["kind"] not in _ROUTES or not self.route_refusal(key)]
        if logged:
            names = ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in logged)
            logger.info("%s/%s: apply %s", *key, names)

    def _is_drifted(self, key: ServiceKey, planned: Plan) -> bool:
        # While the spec cannot be used, the plan may have no Service. The drift stays noted until a plan has one. If
        # only the Service with the digest of Secrets is planned, drift of other objects may be forgotten: all of them
        # are applied once a plan has them again.
        has_shared = any(each["kind"] == "Service" for each in planned.wanted)
        return has_shared and self._drift.take(key)

    def _find_right(
        self, key: ServiceKey, hashes: Mapping[int, Manifest], new: frozenset[str], listed: ListedObjects
    ) -> frozenset[int]:
        """Returns the hashes of the objects that existed before this process and equal their manifests."""
        right = {number for number, each in hashes.items() if self._is_right(key, each, new, listed)}
        if any(has_digest(hashes[number]) for number in right):
            # Secrets cannot be read. The object with their digest was written after them.
            right |= {number for number, each in hashes.items() if _is_shared_secret(each)}
        return frozenset(right)

    def _is_right(self, key: ServiceKey, manifest: Manifest, new: frozenset[str], listed: ListedObjects) -> bool:
        if manifest["kind"] == KIND_OF_OLD_SPECS:
            return manifest["metadata"]["name"] not in new
        if _is_of_replica(manifest):
            # If the replica is not new, its RayCluster exists, and these objects were created before the RayCluster.
            return manifest["metadata"]["labels"][GROUP_LABEL] not in new
        return self._drift.is_right(key, manifest, listed)

    async def _write(self, key: ServiceKey, due: Sequence[Manifest], new: frozenset[str]) -> None:
        """Writes the objects in this order: shared objects, objects of each replica, RayClusters and Jobs, routes.

        If a shared Secret cannot be written, all other objects that may exist are still written, so that a change by
        somebody else is repaired. At the end, raises the failure.

        A route that cannot be written is no failure: `route_refusal` has the cause.
        """
        shared, of_replicas, last = [], dict[str, list[Manifest]](), []
        routes = [each for each in due if each["kind"] in _ROUTES]
        for each in due:
            if each["kind"] in _ROUTES:
                continue
            if each["kind"] in _LAST:
                last.append(each)
            elif _is_of_replica(each):
                of_replicas.setdefault(each["metadata"]["labels"][GROUP_LABEL], []).append(each)
            else:
                shared.append(each)
        failed = await self._shared.write(key, shared, new)
        if failed.others:
            # No ConfigMap of a replica is written, so none is left without its Secret.
            raise most_urgent([*failed.others, *failed.secrets])
        if failed.secrets:
            # The head pod of a new replica would wait for the Secret, and would keep its accelerators meanwhile.
            of_replicas = {replica: parts for replica, parts in of_replicas.items() if replica not in new}
            last = []
        # Each ConfigMap is followed by its Secret.
        await all_of(
            self._writer.write_parts(key, sorted(parts, key=_order_of_parts), is_new=replica in new)
            for replica, parts in of_replicas.items()
        )
        for each in last:
            await self._writer.write(key, each, is_new=True)
        await self._write_routes(key, routes)
        if failed.secrets:
            raise most_urgent(failed.secrets)

    async def _write_routes(self, key: ServiceKey, routes: Sequence[Manifest]) -> None:
        refusals = []
        for each in routes:
            try:
                await self._writer.write(key, each, is_new=False)
            except (KubeUnreachable, Deposed):
                raise
            except OperatorError as error:
                refusals.append(str(as_refusal(error)))
        before = self.route_refusal(key)
        if refusals and refusals[0] != before:
            logger.warning("%s/%s: %s", *key, refusals[0])
        self._route_refusals.pop(key, None)
        if refusals:
            self._route_refusals[key] = refusals[0]


def _is_of_replica(manifest: Manifest) -> bool:
    return manifest["kind"] in _OF_REPLICAS and GROUP_LABEL in manifest["metadata"]["labels"]


def _is_shared_secret(manifest: Manifest) -> bool:
    return manifest["kind"] == "Secret" and not _is_of_replica(manifest)


def _order_of_parts(manifest: Manifest) -> int:
    return _OF_REPLICAS.index(manifest["kind"])
