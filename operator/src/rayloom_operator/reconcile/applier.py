"""Carries out what was planned for a service: routes, objects to apply, objects to delete."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from rayloom_operator import names
from rayloom_operator.api.spec import KIND
from rayloom_operator.decide.plan import Deletion, Drain, Plan, Route
from rayloom_operator.engines.request import ask_either
from rayloom_operator.engines.status import shown
from rayloom_operator.errors import EngineUnavailable, OperatorError, Refused
from rayloom_operator.kube.client import CONFLICT, INVALID, NOT_FOUND, Deposed, Kube, KubeError, KubeUnreachable
from rayloom_operator.names import Manifest, ServiceKey, object_path, path_of
from rayloom_operator.objects.old_spec import KIND_OF_OLD_SPECS
from rayloom_operator.objects.ownership import Whose, whose
from rayloom_operator.observe.drift import Drift, ListedObjects

logger = logging.getLogger(__name__)

# HTTP codes of answers that stay the same until someone changes the spec or the cluster.
_REFUSALS = (400, 403, NOT_FOUND, INVALID)
# And an answer of code 500: a field that the object's definition lacks, or one of another type. Of ours only what a pod
# template says is not checked before.
_UNTYPED = "failed to create typed patch object"
_FIELDS_OF_TEMPLATES = (
    (".spec.headGroupSpec.template.", "spec.podTemplate.head."),
    (".spec.workerGroupSpecs[0].template.", "spec.podTemplate.worker."),
)
_MAX_MESSAGE = 1000
# What was applied is applied again no sooner.
_LEAST_S = 10.0
# Kubernetes removes what a deleted service has left within so many seconds, mostly at once.
_COLLECTION_S = 30.0
# Their pods need all else, and that one of them is there says that all else was made.
_LAST = ("RayCluster", "Job")
# What each group has of its own, in the order in which it is made.
_OF_GROUPS = ("ConfigMap", "Secret")
# Of a RayCluster that was made, or may have been: its service and name.
OnCluster = Callable[[ServiceKey, str], None]
# Of one whose engine was told to drain (True) or to go on, or may have been.
OnDrain = Callable[[ServiceKey, str, bool], None]


class Applier:
    """Lives in one event loop."""

    def __init__(self, kube: Kube, drift: Drift, on_cluster: OnCluster, on_drain: OnDrain) -> None:
        self._kube = kube
        self._drift = drift
        self._on_cluster, self._on_drain = on_cluster, on_drain
        # Hashes of the last plan's manifests, which would be most of the memory; when all of it was done; and after
        # which share of the interval it is done again. At first that is any, or services made at once stay in step.
        self._applied: dict[ServiceKey, tuple[frozenset[int], float, float]] = {}
        # Names of Secrets that are somebody else's, and when that was found.
        self._taken_since: dict[ServiceKey, dict[str, float]] = {}

    def forget(self, key: ServiceKey) -> None:
        """The service is gone."""
        self._applied.pop(key, None)
        self._taken_since.pop(key, None)
        self._drift.forget(key)

    async def carry_out(self, key: ServiceKey, planned: Plan, interval_s: float) -> None:
        """Does what is planned. What was applied before is applied again after `interval_s`.

        What is refused keeps nothing else from being done. Raises Refused for what the API server will not take before
        somebody changes something, KubeError otherwise.
        """
        errors: list[OperatorError] = []

        async def attempt(step: Awaitable[None]) -> None:
            try:
                await step
            except (KubeUnreachable, Deposed):
                raise
            except OperatorError as error:
                errors.append(_verdict(error))

        await self._drain(key, [each for each in planned.drains if not each.wanted])
        for route in planned.routes:
            await attempt(self._route(key, route))
        await attempt(self._apply(key, planned, interval_s))
        await self._drain(key, [each for each in planned.drains if each.wanted])
        for deletion in planned.deletions:
            await attempt(self._delete(key, deletion))
        # A refusal is told before what the next turn may find otherwise.
        for error in sorted(errors, key=lambda error: not isinstance(error, Refused)):
            raise error

    async def _drain(self, key: ServiceKey, drains: Sequence[Drain]) -> None:
        """Engines that do not take it are asked again in the next turn."""
        if drains and not self._kube.may_write():
            raise Deposed("drains: not asked for, because another operator may lead")
        await asyncio.gather(*(self._ask(key, each) for each in drains))

    async def _ask(self, key: ServiceKey, drain: Drain) -> None:
        method, words = ("POST", "drain") if drain.wanted else ("DELETE", "take back the drain of")
        logger.info("%s/%s: %s %s", *key, words, drain.group)
        try:
            tokens = (drain.token, drain.old_token)
            code, body = await ask_either(drain.ip, names.ADMIN_PORT, tokens, method, "/drain")
            if code >= 300:
                logger.warning("%s/%s: the engine of %s refuses: %s %s", *key, drain.group, code, shown(body))
                return
        except EngineUnavailable as error:
            logger.warning("%s/%s: the engine of %s gave no answer to that: %s", *key, drain.group, error)
        self._on_drain(key, drain.group, drain.wanted)

    async def _delete(self, key: ServiceKey, deletion: Deletion) -> None:
        logger.info("%s/%s: delete %s", *key, deletion.path)
        await self._kube.delete(
            deletion.path, deletion.uid, grace_s=deletion.grace_s, is_foreground=deletion.is_foreground
        )

    async def _route(self, key: ServiceKey, route: Route) -> None:
        logger.info("%s/%s: route to pod %s: %s", *key, route.pod.name, "on" if route.wanted else "off")
        # Of this very pod: its name may be another's by now.
        labels = {"uid": route.pod.uid, "labels": {names.ROUTE_LABEL: "true" if route.wanted else None}}
        try:
            await self._kube.patch(object_path("v1", "Pod", key[0], route.pod.name), {"metadata": labels})
        except KubeError as error:
            if error.code != NOT_FOUND and not (error.code == INVALID and "metadata.uid" in str(error)):
                raise

    async def _apply(self, key: ServiceKey, planned: Plan, interval_s: float) -> None:
        """Applies what was not in the last plan; everything when `interval_s` have passed since that was done, after an
        error, and after somebody else's change.

        Of what an earlier operator has left, that which is as it should be counts as applied.
        """
        now = asyncio.get_running_loop().time()
        found = self._drift.take_listed(key)
        before, at, share = self._applied.pop(key, (frozenset(), 0.0, 1.0))
        hashes = {hash(msgspec.json.encode(each)): each for each in planned.wanted}
        if found is not None:
            right = (number for number, each in hashes.items() if self._is_right(key, each, planned.new, found))
            before, at, share = frozenset(right), now, random.random()
        # A RayCluster or a Job is planned only while there is none.
        new = [each for number, each in hashes.items() if number not in before or each["kind"] in _LAST]
        if new:
            logger.info(
                "%s/%s: apply %s", *key, ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in new)
            )
        # While the spec cannot be used nothing is put right, and what somebody changed is to be known later.
        is_drifted = any(each["kind"] == "Service" for each in planned.wanted) and self._drift.take(key)
        is_all = is_drifted or not before or now - at >= max(interval_s * share, min(interval_s, _LEAST_S))
        now_due = planned.wanted if is_all else new
        needed = [each for each in now_due if each["kind"] not in _LAST]
        shared = [each for each in needed if each["kind"] not in _OF_GROUPS]
        await _all(self._write(key, each, planned.new) for each in shared)
        # A failure above leaves no ConfigMap behind whose Secret was never asked for.
        groups: dict[str, list[Manifest]] = {}
        for each in needed:
            if each["kind"] in _OF_GROUPS:
                groups.setdefault(each["metadata"]["labels"][names.GROUP_LABEL], []).append(each)
        await _all(self._write_parts(key, parts, planned.new) for parts in groups.values())
        for manifest in now_due:
            if manifest["kind"] in _LAST:
                await self._write(key, manifest, planned.new)
        if is_all and found is None:
            at, share = now, 1.0
        self._applied[key] = (frozenset(hashes), at, share)

    def _is_right(self, key: ServiceKey, manifest: Manifest, new_groups: frozenset[str], found: ListedObjects) -> bool:
        if manifest["kind"] == KIND_OF_OLD_SPECS:
            return manifest["metadata"]["name"] not in new_groups
        if manifest["kind"] in _OF_GROUPS:
            # They were made before their RayCluster.
            return manifest["metadata"]["labels"].get(names.GROUP_LABEL) not in new_groups
        return self._drift.is_right(key, manifest, found)

    async def _write_parts(self, key: ServiceKey, parts: list[Manifest], new_groups: frozenset[str]) -> None:
        """Makes a group's ConfigMap, which says that the Secret of its group is ours as well, and then the Secret."""
        is_first = False
        for each in sorted(parts, key=lambda each: _OF_GROUPS.index(each["kind"])):
            is_new = each["metadata"]["labels"][names.GROUP_LABEL] in new_groups
            if each["kind"] == "ConfigMap":
                is_first = await self._make(each, is_new=is_new)
            else:
                # Made, never changed or read: the right to patch a Secret is the right to read every Secret.
                # Of a group that is not there yet, it is another's remains.
                await self._make_secret(key, each, is_new=is_new, is_first=is_first)

    async def _write(self, key: ServiceKey, manifest: Manifest, new_names: frozenset[str]) -> None:
        kind = manifest["kind"]
        if kind == KIND_OF_OLD_SPECS:
            # That of a deleted service of the same name goes with it, sooner or later.
            await self._make(manifest, is_new=manifest["metadata"]["name"] in new_names)
        elif kind == "Job":
            await self._kube.create(manifest)
        elif kind == "RayCluster":
            try:
                await self._kube.apply(manifest)
            except KubeUnreachable:
                self._on_cluster(key, manifest["metadata"]["name"])
                raise
            self._on_cluster(key, manifest["metadata"]["name"])
        else:
            self._drift.wrote(key, await self._apply_ours(key, manifest))

    async def _make(self, manifest: Manifest, *, is_new: bool) -> bool:
        """Makes an object that is never changed. What is there in place of a new one goes first, if it is ours.

        Gives whether nothing was there.
        """
        if await self._kube.create(manifest):
            return True
        if not is_new:
            return False
        found = await self._found(path_of(manifest))
        if found is not None and whose(found, manifest) is Whose.THEIRS:
            raise _taken(manifest)
        await self._remake(manifest, "" if found is None else found["metadata"]["uid"])
        return False

    async def _make_secret(self, key: ServiceKey, manifest: Manifest, *, is_new: bool, is_first: bool) -> None:
        """Makes a Secret, which the operator may not read.

        A ConfigMap of the group that was there before this pass was made by one that made the Secret too, or was about
        to. Where there `is_first` one now, the Secret is somebody else's, and the ConfigMap goes again: it would say
        otherwise.
        """
        meta = manifest["metadata"]
        if await self._kube.create(manifest) or not is_new:
            self._taken_since.get(key, {}).pop(meta["name"], None)
            return
        taken = self._taken_since.setdefault(key, {})
        if not is_first and meta["name"] not in taken:
            await self._remake(manifest)
            return
        now = asyncio.get_running_loop().time()
        since = taken.setdefault(meta["name"], now)
        await self._kube.delete(object_path("v1", "ConfigMap", meta["namespace"], meta["labels"][names.GROUP_LABEL]))
        if now - since > _COLLECTION_S:
            raise _taken(manifest)
        raise OperatorError(f"the Secret {meta['name']} is there already, of a {KIND} that was deleted perhaps")

    async def _remake(self, manifest: Manifest, uid: str = "") -> None:
        await self._kube.delete(path_of(manifest), uid)
        if not await self._kube.create(manifest):
            raise OperatorError(f"{path_of(manifest)} was deleted, and somebody else has made one since")

    async def _apply_ours(self, key: ServiceKey, manifest: Manifest) -> Manifest:
        """Applies an object. Its owner is read first, unless the drift watch knows which object is ours."""
        uid = self._drift.uid_of_ours(key, manifest["kind"])
        if uid is None:
            return await self._claim(manifest)
        try:
            # The API server refuses the uid of an object that is gone, also where another one has the name by now.
            return await self._kube.apply(manifest | {"metadata": manifest["metadata"] | {"uid": uid}})
        except KubeError as error:
            if error.code not in (CONFLICT, NOT_FOUND) and not (error.code == INVALID and "metadata.uid" in str(error)):
                raise
            return await self._claim(manifest)

    async def _claim(self, manifest: Manifest) -> Manifest:
        """Applies an object, unless one of its name is somebody else's."""
        found = await self._found(path_of(manifest))
        if found is None:
            # Not by POST: the first apply after that would change who manages it, and so the object.
            return await self._kube.apply(manifest, force=False)
        owner = whose(found, manifest)
        # Clients know the Service by its name, so it takes over nothing that another has made.
        is_taken_over = manifest["kind"] != "Service" and owner is not Whose.THEIRS
        if owner is Whose.OURS or is_taken_over:
            return await self._kube.apply(manifest)
        if owner is Whose.LEFT:
            what = f"the {manifest['kind']} {manifest['metadata']['name']}"
            raise OperatorError(f"{what} of a {KIND} that was deleted is still there")
        raise _taken(manifest)

    async def _found(self, path: str) -> Manifest | None:
        try:
            return await self._kube.get(path)
        except KubeError as error:
            if error.code != NOT_FOUND:
                raise
            return None


async def _all(steps: Iterable[Awaitable[None]]) -> None:
    """Ends all of them, and raises the first failure."""
    for failure in await asyncio.gather(*steps, return_exceptions=True):
        if failure is not None:
            raise failure


def _taken(manifest: Manifest) -> Refused:
    what = f"the {manifest['kind']} {manifest['metadata']['name']}"
    return Refused(f"{what} exists and is not ours; delete it, or give this {KIND} another name")


def _verdict(error: OperatorError) -> OperatorError:
    if not isinstance(error, KubeError):
        return error
    message = str(error)
    if _UNTYPED in message:
        for field, ours in _FIELDS_OF_TEMPLATES:
            message = message.replace(field, ours)
    # A namespace that is being deleted refuses everything, until its services are gone as well.
    elif error.code not in _REFUSALS or "being terminated" in message:
        return error
    return Refused(f"the API server refused: {message[:_MAX_MESSAGE]}")
