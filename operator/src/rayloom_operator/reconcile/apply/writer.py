"""Writes one object, unless an object of that name belongs to another owner.

Another owner's object may have such a name, because names are derived from the name of the LLMService.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rayloom_operator.api.spec import KIND
from rayloom_operator.errors import OperatorError, Refused
from rayloom_operator.kube.client import CONFLICT, NOT_FOUND, Kube, KubeError, KubeUnreachable
from rayloom_operator.names import (
    GROUP_LABEL,
    LLMGATEWAY_LABEL,
    RENEWED_LABEL,
    Manifest,
    ServiceKey,
    object_path,
    path_of,
)
from rayloom_operator.objects.old_spec import KIND_OF_OLD_SPECS
from rayloom_operator.objects.ownership import Whose, whose
from rayloom_operator.observe.drift import Drift

# Kubernetes' garbage collection deletes the objects of a deleted service within this many seconds, mostly at once.
_COLLECTION_S = 30.0
# Called with the service and name of a RayCluster that was created. Also called if the API server did not answer: the
# RayCluster may have been created.
OnCluster = Callable[[ServiceKey, str], None]


class ObjectWriter:
    """Writes objects to the API server, except those of other owners. Not thread-safe: used in one event loop."""

    def __init__(self, kube: Kube, drift: Drift, on_cluster: OnCluster) -> None:
        self._kube = kube
        self._drift = drift
        self._on_cluster = on_cluster
        # Service -> name of a Secret that seems to belong to another owner -> event loop time at which the Secret was
        # first found.
        self._taken_since: dict[ServiceKey, dict[str, float]] = {}

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted service."""
        self._taken_since.pop(key, None)

    async def write(self, key: ServiceKey, manifest: Manifest, *, is_new: bool) -> None:
        """Creates or applies an object.

        `is_new`: the revision of a stored spec (a ControllerRevision) is new, so an existing object of that name is a
        leftover. Objects of other kinds ignore `is_new`.

        Raises Refused if an object of that name has another owner, and OperatorError or KubeError if a retry may help.
        """
        kind = manifest["kind"]
        if kind == KIND_OF_OLD_SPECS:
            # A leftover belongs to a deleted service of the same name. Kubernetes will delete the leftover, so it is
            # replaced.
            await self._create(manifest, is_new=is_new)
        elif kind == "Secret" and manifest["metadata"]["labels"].keys() & {LLMGATEWAY_LABEL, RENEWED_LABEL}:
            # The Secret's content changes with services and aliases, or when a certificate is renewed. The Secret is
            # replaced and not patched, because the answer to a patch is the whole stored Secret. The operator may not
            # read what it did not write.
            await self._kube.replace(manifest)
        elif kind in ("Job", "Secret"):
            # An existing Secret stays as it is. The Secret is ours, because its name contains a hash of the service's
            # uid.
            await self._kube.create(manifest)
        elif kind == "RayCluster":
            await self._apply_cluster(key, manifest)
        else:
            self._drift.wrote(key, await self._apply(key, manifest))

    async def write_parts(self, key: ServiceKey, parts: Sequence[Manifest], *, is_new: bool) -> None:
        """Creates an engine replica's ConfigMap and then its Secret.

        `is_new`: the replica did not exist before, so existing objects are left over from a deleted service, or are
        another owner's. An existing Secret is ours if its ConfigMap existed before. The Secret is another owner's if
        the ConfigMap was created just now (`_create_secret`).
        """
        is_first = False
        for each in parts:
            if each["kind"] == "ConfigMap":
                is_first = await self._create(each, is_new=is_new)
            else:
                # A Secret is created and never changed: the right to patch Secrets would let the operator read them.
                await self._create_secret(key, each, is_new=is_new, is_first=is_first)

    async def _apply_cluster(self, key: ServiceKey, manifest: Manifest) -> None:
        try:
            await self._kube.apply(manifest)
        except KubeUnreachable:
            self._on_cluster(key, manifest["metadata"]["name"])
            raise
        self._on_cluster(key, manifest["metadata"]["name"])

    async def _create(self, manifest: Manifest, *, is_new: bool) -> bool:
        """Creates an object that is never changed afterwards. Returns True if no object of that name existed.

        If the object `is_new`, an existing object of that name is deleted and recreated. Raises Refused if the existing
        object belongs to another owner.
        """
        if await self._kube.create(manifest):
            return True
        if not is_new:
            return False
        found = await self._found(path_of(manifest))
        if found is not None and whose(found, manifest) is Whose.THEIRS:
            raise _taken(manifest)
        await self._recreate(manifest, "" if found is None else found["metadata"]["uid"])
        return False

    async def _create_secret(self, key: ServiceKey, manifest: Manifest, *, is_new: bool, is_first: bool) -> None:
        """Creates a replica's Secret. The operator may not read Secrets, so the ConfigMap shows the Secret's owner.

        If the ConfigMap existed before, an earlier reconcile created it, so an existing Secret is ours as well. If the
        ConfigMap `is_first` (created just now), an existing Secret is another owner's. Then the ConfigMap is deleted
        again, because in the next reconcile the ConfigMap would make the Secret look like ours.
        """
        meta = manifest["metadata"]
        if await self._kube.create(manifest) or not is_new:
            self._taken_since.get(key, {}).pop(meta["name"], None)
            return
        taken = self._taken_since.setdefault(key, {})
        if not is_first and meta["name"] not in taken:
            await self._recreate(manifest)
            return
        now = asyncio.get_running_loop().time()
        since = taken.setdefault(meta["name"], now)
        await self._kube.delete(object_path("v1", "ConfigMap", meta["namespace"], meta["labels"][GROUP_LABEL]))
        if now - since > _COLLECTION_S:
            raise _taken(manifest)
        raise OperatorError(
            f"the Secret {meta['name']} exists already, perhaps from a deleted {KIND} of the same name; the operator "
            "waits until Kubernetes has deleted it"
        )

    async def _recreate(self, manifest: Manifest, uid: str = "") -> None:
        await self._kube.delete(path_of(manifest), uid)
        if not await self._kube.create(manifest):
            raise OperatorError(
                f"{path_of(manifest)} was deleted, but another client has created it again; the operator retries"
            )

    async def _apply(self, key: ServiceKey, manifest: Manifest) -> Manifest:
        """Applies an object. Reads an existing object's owner first, unless the drift watch knows our object's uid."""
        uid = self._drift.uid_of_ours(key, manifest["kind"], manifest["metadata"]["name"])
        if uid is None:
            return await self._claim(manifest)
        try:
            # With the uid, the API server refuses the write if the object is gone or another object has its name now.
            return await self._kube.apply(manifest | {"metadata": manifest["metadata"] | {"uid": uid}})
        except KubeError as error:
            if error.code not in (CONFLICT, NOT_FOUND) and not error.is_other_uid:
                raise
            return await self._claim(manifest)

    async def _claim(self, manifest: Manifest) -> Manifest:
        """Reads the owner of an existing object, and applies `manifest` unless the owner is somebody else."""
        found = await self._found(path_of(manifest))
        if found is None:
            # The object is created by an apply: after a POST, the first apply would change the object's managedFields.
            return await self._kube.apply(manifest, force=False)
        owner = whose(found, manifest)
        # A Service without an owner is not taken over: somebody's clients may use it by its name.
        is_taken_over = manifest["kind"] != "Service" and owner is not Whose.THEIRS
        if owner is Whose.OURS or is_taken_over:
            return await self._kube.apply(manifest)
        if owner is Whose.LEFT:
            what = f"the {manifest['kind']} {manifest['metadata']['name']}"
            raise OperatorError(
                f"{what} of a deleted {_owner_kind(manifest)} of the same name still exists; the operator waits until "
                "Kubernetes has deleted it"
            )
        raise _taken(manifest)

    async def _found(self, path: str) -> Manifest | None:
        try:
            return await self._kube.get(path)
        except KubeError as error:
            if error.code != NOT_FOUND:
                raise
            return None


def _taken(manifest: Manifest) -> Refused:
    what = f"the {manifest['kind']} {manifest['metadata']['name']}"
    return Refused(f"{what} exists and is not ours; delete it, or give this {_owner_kind(manifest)} another name")


def _owner_kind(manifest: Manifest) -> str:
    (owner,) = manifest["metadata"]["ownerReferences"]
    return str(owner["kind"])
