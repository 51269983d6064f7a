"""Brings the cluster to what each LLMService asks for, and says in its status what is true.

    event of a service, RayCluster or pod, news of an engine, time  ->  queue  ->  reconcile(service)
    reconcile:  parse -> observe -> plan -> carry out -> status -> write

Every cause takes the same path. All memory is in the cluster, so a restarted operator goes on where the last one was.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

from rayloom_operator.api import API_VERSION, KIND, LLMService, parse
from rayloom_operator.api_status import Status
from rayloom_operator.engine_poller import EnginePoller
from rayloom_operator.errors import OperatorError, SpecError
from rayloom_operator.k8s_events import events
from rayloom_operator.kube import Kube, KubeError, object_path
from rayloom_operator.names import GROUP_LABEL, REVISION_LABEL, ROUTE_LABEL, Manifest
from rayloom_operator.objects.admin_secret import admin_token
from rayloom_operator.objects.pod import MODEL_VOLUME
from rayloom_operator.observed import Group, Observed, pod
from rayloom_operator.plan import Plan, Settings, plan, resolved_image
from rayloom_operator.reflector import Reflector, ServiceKey
from rayloom_operator.revision import revision
from rayloom_operator.status import SILENCE_LIMIT_S, status
from rayloom_operator.work_queue import WorkQueue

logger = logging.getLogger(__name__)

_NUM_WORKERS = 8
# Objects that nobody watches, such as Services, are applied again so often in case somebody changed them.
_REAPPLY_S = 300.0
# Kubelets say why a volume cannot be mounted only in events, so those are read while a pod waits.
_MOUNT_CHECK_S = 2.0


class Controller:
    """Lives in one event loop. `set_service` is how it learns of LLMServices."""

    def __init__(self, kube: Kube, settings: Settings) -> None:
        self._kube = kube
        self._settings = settings
        self._services: dict[ServiceKey, Manifest] = {}
        self._queue: WorkQueue[ServiceKey] = WorkQueue()
        self._poller = EnginePoller(self._queue.add)
        self._clusters = Reflector(kube, "ray.io/v1", "RayCluster", self._queue.add)
        self._pods = Reflector(kube, "v1", "Pod", self._pod_changed)
        self._applied: dict[ServiceKey, tuple[tuple[Manifest, ...], float]] = {}  # what was applied last, and when

    def set_service(self, document: Manifest, is_deleted: bool) -> None:
        """Takes what kopf saw of an LLMService."""
        key = (document["metadata"]["namespace"], document["metadata"]["name"])
        if is_deleted or document["metadata"].get("deletionTimestamp"):
            self._services.pop(key, None)
        else:
            self._services[key] = document
        self._queue.add(key)

    async def run(self) -> None:
        """Works until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._clusters.run())
                tasks.create_task(self._pods.run())
                # Before that, what exists would look like something to make.
                await self._clusters.is_synced.wait()
                await self._pods.is_synced.wait()
                for _ in range(_NUM_WORKERS):
                    tasks.create_task(self._queue.work(self._reconcile))
        finally:
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
        service, problems = _parsed(document)
        groups = await self._observe(key, document)
        current = "" if service is None else revision(service, resolved_image(service, self._settings))
        refusal: KubeError | None = None
        try:
            await self._carry_out(key, plan(service, Observed(groups=groups), self._settings))
        except KubeError as error:
            refusal = error
        if refusal is None and any(group.head and group.head.ip and group.reading is None for group in groups):
            # The first answer, or its absence, is a moment away, and it starts the next turn. Without it a restarted
            # operator would call an engine that serves unavailable.
            return _REAPPLY_S
        computed = status(
            service,
            problems,
            Observed(groups=groups, apply_error="" if refusal is None else f"the API server refused: {refusal}"),
            generation=document["metadata"]["generation"],
            revision=current,
            previous=document.get("status", {}),
            now=asyncio.get_running_loop().time(),
            clock=datetime.now(UTC),
        )
        await self._write(key, document, computed)
        if refusal is not None:
            raise refusal
        if any(group.reading is not None and group.reading.failing_since is not None for group in groups):
            return SILENCE_LIMIT_S / 2
        if any(each.is_mounting for group in groups for each in group.pods):
            return _MOUNT_CHECK_S
        return _REAPPLY_S

    async def _observe(self, key: ServiceKey, document: Manifest) -> tuple[Group, ...]:
        """The groups of this very service: one of the same name that was deleted before may have left some."""
        uid = document["metadata"]["uid"]
        pods = [each for each in self._pods.of_service(key) if "deletionTimestamp" not in each["metadata"]]
        groups = []
        for cluster in self._clusters.of_service(key):
            meta = cluster["metadata"]
            is_ours = any(owner["uid"] == uid for owner in meta.get("ownerReferences", ()))
            if not is_ours or "deletionTimestamp" in meta:
                continue
            own = [each for each in pods if each["metadata"]["labels"].get(GROUP_LABEL) == meta["name"]]
            groups.append(
                Group(
                    name=meta["name"],
                    revision=meta["labels"][REVISION_LABEL],
                    uid=meta["uid"],
                    pods=tuple([pod(each, await self._mount_failure(each)) for each in own]),
                    reading=None,
                )
            )
        targets = {
            group.name: (group.head.ip, admin_token(self._settings.operator_key, key[0], uid, group.name))
            for group in groups
            if group.head is not None and group.head.ip
        }
        self._poller.follow(key, targets)
        return tuple(group.with_reading(self._poller.reading(key[0], group.name)) for group in groups)

    async def _mount_failure(self, document: Manifest) -> str:
        """What the kubelet says about the model's volume while the pod waits for it; empty when it is mounted."""
        has_model = any(volume["name"] == MODEL_VOLUME for volume in document["spec"].get("volumes", ()))
        if not has_model or not pod(document).is_mounting:
            return ""
        meta = document["metadata"]
        found, _ = await self._kube.list(
            object_path("v1", "Event", meta["namespace"]),
            {"fieldSelector": f"involvedObject.uid={meta['uid']},reason=FailedMount"},
        )
        return next((event["message"] for event in found if f'"{MODEL_VOLUME}"' in event["message"]), "")

    async def _carry_out(self, key: ServiceKey, wanted: Plan) -> None:
        namespace = key[0]
        for route in wanted.routes:
            logger.info("%s/%s: route to pod %s: %s", *key, route.pod.name, "on" if route.wanted else "off")
            await self._kube.patch(
                object_path("v1", "Pod", namespace, route.pod.name),
                # Of this very pod: its name may be another's by now.
                {"metadata": {"uid": route.pod.uid, "labels": {ROUTE_LABEL: "true" if route.wanted else None}}},
            )
        for deletion in wanted.deletions:
            logger.info("%s/%s: delete %s %s", *key, deletion.kind, deletion.name)
            path = object_path(deletion.api_version, deletion.kind, namespace, deletion.name)
            await self._kube.delete(path, deletion.uid)
        now = asyncio.get_running_loop().time()
        applied, at = self._applied.get(key, ((), 0.0))
        due = wanted.applied if now - at >= _REAPPLY_S else [each for each in wanted.applied if each not in applied]
        if due:
            logger.info(
                "%s/%s: apply %s", *key, ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in due)
            )
            for manifest in due:
                await self._kube.apply(manifest)
            self._applied[key] = (wanted.applied, now)

    async def _write(self, key: ServiceKey, document: Manifest, computed: Status) -> None:
        content = computed.model_dump(mode="json", by_alias=True)
        if content == document.get("status"):
            return
        meta = document["metadata"]
        reasons = ", ".join(
            f"{condition.type}={condition.status}/{condition.reason}" for condition in computed.conditions
        )
        before = [each["reason"] for each in document.get("status", {}).get("conditions", ())]
        if before != [each.reason for each in computed.conditions]:
            logger.info("%s/%s: %s", *key, reasons)
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
            if error.code in (404, 409):
                return  # It was deleted meanwhile.
            raise
        if self._services.get(key) is document:
            self._services[key] = written
        for event in events(document, computed, datetime.now(UTC)):
            try:
                await self._kube.create(object_path("events.k8s.io/v1", "Event", meta["namespace"]), event)
            except KubeError as error:
                if error.code != 409:  # It was said before.
                    logger.warning("%s/%s: the event %s was refused: %s", *key, event["reason"], error)


def _parsed(document: Manifest) -> tuple[LLMService | None, tuple[str, ...]]:
    """The service, or None and what is wrong with its spec."""
    try:
        return parse(document), ()
    except SpecError as error:
        return None, error.problems
