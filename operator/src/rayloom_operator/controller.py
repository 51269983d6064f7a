"""Brings the cluster to what each LLMService asks for, and says in its status what is true.

    event of a service, RayCluster or pod, news of an engine, time  ->  queue  ->  reconcile(service)
    reconcile:  parse -> observe -> plan -> carry out -> status -> write

Every cause takes the same path. All memory is in the cluster, so a restarted operator goes on where the last one was.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import replace
from datetime import UTC, datetime

from rayloom_operator import names
from rayloom_operator.api import API_VERSION, KIND, LLMService, parse
from rayloom_operator.api_status import Status
from rayloom_operator.drift import Drift
from rayloom_operator.engine_poller import EnginePoller, Target
from rayloom_operator.errors import OperatorError, Refused, SpecError
from rayloom_operator.k8s_events import events
from rayloom_operator.kube import CONFLICT, NOT_FOUND, Kube, KubeError
from rayloom_operator.names import Manifest, ServiceKey, object_path, path_of
from rayloom_operator.objects.companions import admin_token
from rayloom_operator.observed import Group, pod
from rayloom_operator.plan import Plan, Route, Settings, plan
from rayloom_operator.reflector import Reflector
from rayloom_operator.resolved import resolve
from rayloom_operator.revision import revision, with_kept_image
from rayloom_operator.status import SILENCE_LIMIT_S, STALE_S, status
from rayloom_operator.work_queue import WorkQueue

logger = logging.getLogger(__name__)

_NUM_WORKERS = 8
# Objects that nobody watches, such as ConfigMaps, are made again so often in case somebody deleted them.
_REAPPLY_S = 300.0
# Kubelets say why a volume cannot be mounted only in events, so those are read while a pod waits: often while it is
# likely to be news. What a head mounts may also have been deleted, so it is made again as often as the second.
_MOUNT_CHECK_S = 2.0
_LATE_MOUNT_CHECK_S = 10.0
_MOUNT_NEWS_S = 60.0
# HTTP codes of answers that stay the same until someone changes the spec or the cluster.
_REFUSALS = (400, 403, NOT_FOUND, 422)


class Controller:
    """Lives in one event loop. `set_service` is how it learns of LLMServices."""

    def __init__(self, kube: Kube, settings: Settings) -> None:
        self._kube = kube
        self._settings = settings
        self._services: dict[ServiceKey, Manifest] = {}
        self._queue = WorkQueue()
        self._poller = EnginePoller(self._queue.add)
        self._clusters = Reflector(kube, "ray.io/v1", "RayCluster", self._queue.add)
        self._pods = Reflector(kube, "v1", "Pod", self._pod_changed)
        self._drift = Drift(kube, self._queue.add)
        self._applied: dict[ServiceKey, tuple[tuple[Manifest, ...], float]] = {}  # the last plan's, and when it was all
        self._mounting_since: dict[ServiceKey, float] = {}
        self.is_synced = asyncio.Event()  # set once it knows the cluster, and works; also when it ended before

    def set_service(self, document: Manifest, is_deleted: bool) -> None:
        """Takes what kopf saw of an LLMService, unless something newer is known of it or of one made anew."""
        meta = document["metadata"]
        key = (meta["namespace"], meta["name"])
        known = self._services.get(key, {}).get("metadata", {})
        if known and int(meta["resourceVersion"]) < int(known["resourceVersion"]):
            return
        is_gone = is_deleted or "deletionTimestamp" in meta
        if is_gone and known.get("uid", meta["uid"]) != meta["uid"]:
            return
        if is_gone:
            self._services.pop(key, None)
        else:
            self._services[key] = document
        self._queue.add(key, is_new=is_gone or known.get("generation") != meta["generation"])

    async def run(self) -> None:
        """Works until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._clusters.run())
                tasks.create_task(self._pods.run())
                for reflector in self._drift.reflectors:
                    tasks.create_task(reflector.run())
                # Before that, what exists would look like something to make.
                await self._clusters.is_synced.wait()
                await self._pods.is_synced.wait()
                for _ in range(_NUM_WORKERS):
                    tasks.create_task(self._queue.work(self._reconcile))
                self.is_synced.set()
        finally:
            self.is_synced.set()
            await self._poller.close()

    def _pod_changed(self, key: ServiceKey) -> None:
        self._poller.nudge(key)
        self._queue.add(key)

    async def _reconcile(self, key: ServiceKey) -> float | None:
        document = self._services.get(key)
        if document is None:
            # Its objects go by their owner references.
            self._poller.follow(key, {})
            self._applied.pop(key, None)
            self._drift.forget(key)
            self._mounting_since.pop(key, None)
            return None
        try:
            return await self._bring(key, document)
        except OperatorError as error:
            logger.warning("%s/%s: %s; trying again", *key, error)
            raise
        except Exception:
            logger.exception("%s/%s: this is a mistake in the operator; trying again", *key)
            raise

    async def _bring(self, key: ServiceKey, document: Manifest) -> float:
        now = asyncio.get_running_loop().time()
        service: LLMService | None = None
        problems: tuple[str, ...] = ()
        try:
            service = parse(document)
        except SpecError as error:
            problems = error.problems
        groups, taken = await self._observe(key, document)
        is_mounting = any(each.is_mounting for group in groups for each in group.pods)
        mounting_s = now - self._mounting_since.setdefault(key, now) if is_mounting else 0.0
        if not is_mounting:
            self._mounting_since.pop(key, None)
        previous = document.get("status", {})
        resolved = None if service is None else resolve(service, self._settings.image(service))
        if resolved is not None:
            resolved = with_kept_image(resolved, previous.get("image", ""), previous.get("currentRevision", ""))
        refused: Refused | None = None
        try:
            await self._carry_out(key, plan(resolved, groups, self._settings.operator_key, taken), is_mounting)
        except Refused as error:
            refused = error
        if refused is None and any(group.head and group.head.ip and group.reading is None for group in groups):
            # The first answer, or its absence, is a moment away, and it starts the next turn. Without it a restarted
            # operator would call an engine that serves unavailable.
            return STALE_S
        computed = status(
            resolved,
            problems,
            groups,
            "" if refused is None else str(refused),
            generation=document["metadata"]["generation"],
            revision="" if resolved is None else revision(resolved),
            previous=previous,
            now=now,
            clock=datetime.now(UTC),
        )
        await self._write(key, document, computed)
        if refused is not None:
            raise refused
        readings = [group.reading for group in groups if group.reading is not None]
        if any(reading.failing_since is not None for reading in readings):
            return SILENCE_LIMIT_S / 2
        if is_mounting:
            return _MOUNT_CHECK_S if mounting_s < _MOUNT_NEWS_S else _LATE_MOUNT_CHECK_S
        return STALE_S if readings else _REAPPLY_S

    async def _observe(self, key: ServiceKey, document: Manifest) -> tuple[tuple[Group, ...], frozenset[str]]:
        """The groups of this very service, and the names of RayClusters that are there, but not to stay.

        A service of the same name that was deleted before may have left some.
        """
        uid = document["metadata"]["uid"]
        pods = [each for each in self._pods.of_service(key) if "deletionTimestamp" not in each["metadata"]]
        failures = await self._mount_failures(key, pods)
        groups, taken, targets = [], set(), {}
        for cluster in self._clusters.of_service(key):
            meta = cluster["metadata"]
            name = meta["name"]
            if not _is_owned(meta, uid) or "deletionTimestamp" in meta:
                taken.add(name)
                continue
            # By uid: pods of a RayCluster that had this name before may be left.
            own = [each for each in pods if _is_owned(each["metadata"], meta["uid"])]
            group = Group(
                name=name,
                revision=meta["labels"][names.REVISION_LABEL],
                uid=meta["uid"],
                pods=tuple(pod(each, failures.get(each["metadata"]["uid"], "")) for each in own),
                refusal=_refusal(cluster),
                reading=None,
            )
            groups.append(group)
            if group.head is not None and group.head.ip:
                token = admin_token(self._settings.operator_key, key[0], uid, name)
                targets[name] = Target(ip=group.head.ip, token=token, pod_uid=group.head.uid)
        # Forgets what a head said that is another pod by now, so the readings come after it.
        self._poller.follow(key, targets)
        asked = (replace(group, reading=self._poller.reading(key[0], group.name)) for group in groups)
        return tuple(asked), frozenset(taken)

    async def _mount_failures(self, key: ServiceKey, pods: list[Manifest]) -> dict[str, str]:
        """uid of pods that wait for the model's volume -> what the kubelet says about it."""
        waiting = [
            each
            for each in pods
            if any(volume["name"] == names.MODEL_VOLUME for volume in each["spec"].get("volumes", ()))
            and pod(each).is_mounting
        ]
        if not waiting:
            return {}
        selector = {"fieldSelector": "involvedObject.kind=Pod,reason=FailedMount"}
        try:
            found, _ = await self._kube.list(object_path("v1", "Event", key[0]), selector)
        except OperatorError as error:
            logger.warning("%s/%s: why pods wait for a volume is not known: %s", *key, error)
            return {}
        # The newest comes last, and counts.
        found.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        return {
            event["involvedObject"]["uid"]: event["message"]
            for event in found
            if f'"{names.MODEL_VOLUME}"' in event.get("message", "")
        }

    async def _carry_out(self, key: ServiceKey, planned: Plan, is_mounting: bool) -> None:
        try:
            for route in planned.routes:
                await self._route(key, route)
            await self._apply(key, planned, _LATE_MOUNT_CHECK_S if is_mounting else _REAPPLY_S)
            for deletion in planned.deletions:
                logger.info("%s/%s: delete %s", *key, deletion.path)
                await self._kube.delete(deletion.path, deletion.uid)
        except KubeError as error:
            # A namespace that is being deleted refuses everything, until its services are gone as well.
            if error.code not in _REFUSALS or "being terminated" in str(error):
                raise
            raise Refused(f"the API server refused: {error}") from error

    async def _route(self, key: ServiceKey, route: Route) -> None:
        logger.info("%s/%s: route to pod %s: %s", *key, route.pod.name, "on" if route.wanted else "off")
        # Of this very pod: its name may be another's by now.
        labels = {"uid": route.pod.uid, "labels": {names.ROUTE_LABEL: "true" if route.wanted else None}}
        try:
            await self._kube.patch(object_path("v1", "Pod", key[0], route.pod.name), {"metadata": labels})
        except KubeError as error:
            if error.code not in (NOT_FOUND, CONFLICT):
                raise

    async def _apply(self, key: ServiceKey, planned: Plan, interval_s: float) -> None:
        """Applies what was not in the last plan, and everything when `interval_s` have passed since that was done."""
        now = asyncio.get_running_loop().time()
        before, at = self._applied.get(key, ((), 0.0))
        # A RayCluster is planned only while there is none.
        new = [each for each in planned.wanted if each not in before or each["kind"] == "RayCluster"]
        if new:
            logger.info(
                "%s/%s: apply %s", *key, ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in new)
            )
        is_all = self._drift.take(key) or not before or now - at >= interval_s
        for manifest in planned.wanted if is_all else new:
            if manifest["kind"] == "Service":
                self._drift.wrote(key, await self._claim(manifest))
            elif manifest["kind"] in ("ConfigMap", "Secret"):
                # Made, never changed or read: the right to patch a Secret is the right to read every Secret.
                if planned.is_new:
                    await self._kube.delete(path_of(manifest))
                await self._kube.create(manifest)
            else:
                self._drift.wrote(key, await self._kube.apply(manifest))
        self._applied[key] = (planned.wanted, now if is_all else at)

    async def _claim(self, manifest: Manifest) -> Manifest:
        """Applies an object whose name the user chose, unless one of that name is somebody else's."""
        try:
            found = await self._kube.get(path_of(manifest))
        except KubeError as error:
            if error.code != NOT_FOUND:
                raise
            # Not by POST: the first apply after that would change who manages it, and so the object.
            return await self._kube.apply(manifest, force=False)
        (owner,) = manifest["metadata"]["ownerReferences"]
        if _is_owned(found["metadata"], owner["uid"]):
            return await self._kube.apply(manifest)
        owners = found["metadata"].get("ownerReferences", ())
        what = f"the {manifest['kind']} {owner['name']}"
        if any((each["kind"], each["name"]) == (owner["kind"], owner["name"]) for each in owners):
            raise OperatorError(f"{what} of a {KIND} that was deleted is still there")
        raise Refused(f"{what} exists and is not ours; delete it, or give this {KIND} another name")

    async def _write(self, key: ServiceKey, document: Manifest, computed: Status) -> None:
        content = computed.model_dump(mode="json", by_alias=True)
        if content == document.get("status"):
            return
        meta = document["metadata"]
        before = [each["reason"] for each in document.get("status", {}).get("conditions", ())]
        if before != [each.reason for each in computed.conditions]:
            said = ", ".join(f"{each.type}={each.status}/{each.reason}" for each in computed.conditions)
            logger.info("%s/%s: %s", *key, said)
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            # With the uid, so that a service made anew under this name does not get it.
            "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
            "status": content,
        }
        try:
            written = await self._kube.apply(manifest, "/status")
        except KubeError as error:
            if error.code != NOT_FOUND and not (error.code == CONFLICT and "UID" in str(error)):
                raise
            # It was deleted, or made anew. kopf does not say so when that happened while its watch was broken.
            if self._services.get(key) is document:
                del self._services[key]
                self._queue.add(key)
            return
        if self._services.get(key) is document:
            self._services[key] = written
        for event in events(document, computed, datetime.now(UTC)):
            try:
                await self._kube.create(event)
            except KubeError as error:
                logger.warning("%s/%s: the event %s was refused: %s", *key, event["reason"], error)


def _is_owned(meta: Manifest, uid: str) -> bool:
    """Whether an object with this metadata goes when the one with `uid` goes."""
    return any(owner["uid"] == uid for owner in meta.get("ownerReferences", ()))


def _refusal(cluster: Manifest) -> str:
    """Why KubeRay could not make a pod, such as a quota; empty when it could."""
    conditions = cluster.get("status", {}).get("conditions", ())
    failing = (each for each in conditions if (each["type"], each["status"]) == ("ReplicaFailure", "True"))
    message = next((each.get("message", "") for each in failing), "")
    # Each attempt has a name of its own; what says the same is to be the same, or each would be written and told.
    return re.sub(rf'"({re.escape(cluster["metadata"]["name"])}-[^"]*)-[a-z0-9]{{5}}"', r'"\1"', message)
