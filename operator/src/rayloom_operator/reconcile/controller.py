"""Brings the cluster to what each LLMService asks for, and says in its status what is true.

    event of a service, RayCluster or pod, news of an engine, time  ->  queue  ->  reconcile(service)
    reconcile:  parse -> observe -> plan -> carry out -> status -> write

Every cause takes the same path. All memory is in the cluster, so a restarted operator goes on where the last one was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain

from rayloom_operator.api.accelerator_memory import WITHOUT_CLUSTER
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.spec import API_VERSION, KIND, LLMService, parse, without_spec
from rayloom_operator.api.status import Reason, stored_model, stored_rollout
from rayloom_operator.decide.held import held_plan
from rayloom_operator.decide.inspection import Inspection, inspect
from rayloom_operator.decide.plan import Settings, plan
from rayloom_operator.decide.recovery import remembered
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.rollout.revisions import Lineage
from rayloom_operator.decide.status import VALID, status
from rayloom_operator.errors import DoesNotFit, MemoryUnknown, NotAllowed, OperatorError, Refused, SpecError
from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.packed import PackedDict
from rayloom_operator.kube.reflector import without_managed_fields
from rayloom_operator.names import Manifest, ServiceKey, object_path
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.observed import Group, Verdict
from rayloom_operator.observe.observer import Observer
from rayloom_operator.observe.poller import EnginePoller
from rayloom_operator.observe.verdict import STALE_S, is_well, mute_at
from rayloom_operator.observe.watches import Watches
from rayloom_operator.reconcile.applier import Applier
from rayloom_operator.reconcile.known import Known
from rayloom_operator.reconcile.lookups import Roller
from rayloom_operator.reconcile.sizer import Sizer
from rayloom_operator.reconcile.status_writer import StatusWriter
from rayloom_operator.reconcile.work_queue import REGULAR_S, WorkQueue
from rayloom_operator.resolve.resolved import Resolved, is_sized, resolve
from rayloom_operator.telemetry.logs import SERVICE
from rayloom_operator.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# Objects that nobody watches, such as ConfigMaps, are made again so often in case somebody deleted them.
_REAPPLY_S = 1800.0
# Kubelets say why a volume cannot be mounted only in events, so those are read while a pod waits: often while it is
# likely to be news. What a head mounts may also have been deleted, so it is made again as often as the second.
_MOUNT_CHECK_S = 2.0
_LATE_MOUNT_CHECK_S = 10.0
_MOUNT_NEWS_S = 60.0
# kopf may miss that a service was deleted, while its watch is broken.
_RELIST_S = 300.0
# A look at what is not known yet.
_SOON_S = 1.0
_SILENCE_LOOK_S = 5.0
# A failure that was written down is acted on in a turn of its own, that soon.
_NEXT_TURN_S = 0.2
_REFUSED_LOOK_S = 2.0
# Why a spec that is right in itself cannot be used.
_REASONS = ((DoesNotFit, Reason.DOES_NOT_FIT), (NotAllowed, Reason.NOT_ALLOWED))
# Nodes get the labels of their accelerators some time after they joined.
_NODES_LOOK_S = 10.0


class Controller:
    """Lives in one event loop. `set_service` is how it learns of LLMServices.

    It looks at `namespaces`, at all of them where there are none, and changes nothing before `leads` is set.
    """

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        *,
        namespaces: Sequence[str] = (),
        leads: asyncio.Event | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._kube = kube
        self._settings = settings
        self._namespaces = namespaces
        self._leads = leads
        self._metrics = metrics or Metrics()
        self._metrics.gauge("queue_depth", lambda: self._queue.depth)
        self._metrics.gauge("engines_polled", lambda: self._poller.num_engines)
        self._metrics.gauge("concurrency", lambda: kube.concurrency.value)
        self._metrics.follow(self._conditions, lambda: self._poller.num_failures)
        self._services: PackedDict[ServiceKey, Known] = PackedDict(Known.of)
        # Opened when it leads: a standby would gather the keys of all services that ever were.
        self._queue = WorkQueue(lambda: kube.concurrency.value, is_open=False, on_wait=self._metrics.waited)
        self._poller = EnginePoller(self._queue.add, lambda: self._queue.depth)
        self.watches = Watches(
            kube,
            namespaces,
            on_change=self._queue.add,
            on_pod=self._pod_changed,
            on_node=self._node_changed,
            on_kuberay=self._kuberay_changed,
        )
        self._clusters, self._pods, self._jobs = self.watches.clusters, self.watches.pods, self.watches.jobs
        self._drift = Drift(kube, self._queue.add, namespaces=namespaces)
        self._observer = Observer(kube, self.watches, self._poller, settings.admin_tokens)
        self._applier = Applier(kube, self._drift, self._observer.note_cluster, self._poller.told)
        self._sizer = Sizer()
        self._roller = Roller(kube, settings, self._observer, self._sizer)
        self._statuses = StatusWriter(kube, self._services, self._metrics, self.set_service, self._edited)
        self._mounting_since: dict[ServiceKey, float] = {}
        # While services are listed: the versions of those that went meanwhile, which later pages may still have.
        self._gone: dict[ServiceKey, int] | None = None

    def set_service(self, document: Manifest, is_deleted: bool) -> None:
        """Takes what kopf saw of an LLMService, unless something newer is known of it or of one made anew."""
        meta = without_managed_fields(document)["metadata"]
        key = (meta["namespace"], meta["name"])
        known = self._services.mark(key)
        is_gone, version = is_deleted or "deletionTimestamp" in meta, int(meta["resourceVersion"])
        if known and version < known.version:
            return
        if not is_gone and self._gone and version <= self._gone.get(key, 0):
            return
        if not is_gone and known and version == known.version:
            return  # the echo of a status that this operator wrote
        if is_gone and known and known.uid != meta["uid"]:
            return
        if is_gone:
            self._services.pop(key, None)
            if self._gone is not None:
                self._gone[key] = version
        else:
            self._services[key] = document
        is_new = not is_gone and not known
        self._queue.add(key, is_changed=is_gone or not known or known.generation != meta["generation"], is_new=is_new)

    async def run(self) -> None:
        """Works until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.watches.run())
                # Before that, what exists would look like something to make.
                await self.watches.is_synced.wait()
                if self._leads is not None:
                    await self._leads.wait()
                    stale = (self._clusters, self._pods, self.watches.endpoints)
                    await asyncio.gather(self._list_services(), *(each.relist() for each in stale))
                tasks.create_task(self._relist())
                for reflector in self._drift.reflectors:
                    tasks.create_task(reflector.run())
                await self._drift.listed()
                self._queue.open(self._services)
                tasks.create_task(self._watch_silence())
                tasks.create_task(self._queue.work(self._metrics.measured(self._reconcile)))
        finally:
            self._sizer.close()
            await self._poller.close()

    async def drain(self) -> None:
        """Begins no more passes, and returns when those that run are over."""
        await self._queue.drain()

    def _conditions(self) -> Iterator[tuple[str, str]]:
        """(type, status) of every condition of every service."""
        return chain.from_iterable(each.conditions for each in self._services.marks())

    async def _relist(self) -> None:
        while True:
            await asyncio.sleep(_RELIST_S)
            await self._list_services()

    async def _list_services(self) -> None:
        """What this process was told while it did not lead may be older than what the leader has done since."""
        self._gone = {}
        for namespace in self._namespaces or ("",):
            while True:
                before = {key: self._services.mark(key) for key in self._services if namespace in ("", key[0])}
                try:
                    async for items, _ in self._kube.pages(object_path(API_VERSION, KIND, namespace), {}):
                        for document in items:
                            before.pop((document["metadata"]["namespace"], document["metadata"]["name"]), None)
                            self.set_service(document, False)
                    break
                except OperatorError as error:
                    logger.warning("the services cannot be listed: %s; trying again", error)
                    await asyncio.sleep(_SOON_S)
            for key, known in before.items():
                # What was told meanwhile is newer than the list.
                if known and self._services.mark(key) == known:
                    self.set_service(self._services[key], True)
        self._gone = None

    def _edited(self, key: ServiceKey) -> None:
        self._queue.add(key, is_changed=True)

    def _kuberay_changed(self) -> None:
        for key in self._services:
            self._queue.add(key, is_changed=True)

    def _pod_changed(self, key: ServiceKey) -> None:
        self._poller.nudge(key)
        self._queue.add(key)

    def _node_changed(self, name: str) -> None:
        for key in self._pods.marked(name) & self._services.keys():
            self._queue.add(key)

    async def _watch_silence(self) -> None:
        """Services that are well have no turn of their own that would find an engine of which nothing is heard."""
        while True:
            await asyncio.sleep(_SILENCE_LOOK_S)
            for key in self._poller.silent(asyncio.get_running_loop().time() - STALE_S):
                self._queue.add(key)

    async def _reconcile(self, key: ServiceKey) -> float | None:
        SERVICE.set("/".join(key))
        document = self._services.get(key)
        if document is None:
            # Its objects go by their owner references.
            self._applier.forget(key)
            self._mounting_since.pop(key, None)
            self._statuses.forget(key)
            self._roller.forget(key)
            return await self._observer.forget(key, datetime.now(UTC))
        try:
            return await self._bring(key, document)
        except OperatorError as error:
            logger.warning("%s/%s: %s; trying again", *key, error)
            raise
        except Exception:
            logger.exception("%s/%s: this is a mistake in the operator; trying again", *key)
            raise

    async def _bring(self, key: ServiceKey, document: Manifest) -> float:
        now, clock = asyncio.get_running_loop().time(), datetime.now(UTC)
        previous = document.get("status", {})
        unsupported = self.watches.kuberay_problem
        if not unsupported and not self._clusters.is_synced.is_set():
            return _SOON_S  # KubeRay came back a moment ago, and which RayClusters are left is not known yet.
        resolved: Resolved | None = None
        inspection = Inspection(model=stored_model(previous))
        # Over a spec that cannot be read no node is given up: how long the user would wait for it is not known.
        accepted, patience = VALID, timedelta(days=36_500)
        service: LLMService | None = None
        try:
            service = parse(document)
            patience = timedelta(seconds=service.spec.recovery.node_loss_seconds)
            self._settings.permissions.check(service)
            inspection = await self._inspect(key, previous, service, clock)
            if inspection.facts is not None:
                image = self._settings.image(service)
                resolved = await self._resolve(service, image, inspection.facts, previous)
                resolved = await self._roller.with_kept_image(key, document, resolved, previous)
        except SpecError as error:
            if isinstance(error, MemoryUnknown):
                self._queue.add_after(key, _NODES_LOOK_S)
            reason = next((each for kind, each in _REASONS if isinstance(error, kind)), Reason.INVALID_SPEC)
            accepted = Verdict(reason=reason, message="; ".join(error.problems))
        memory, rollout = remembered(previous), stored_rollout(previous)
        made = [name for name, each in memory.items() if each.state != "BackOff"]
        seen = await self._observer.observe(key, document["metadata"]["uid"], made, patience, clock)
        if any(each.head and each.head.ip and each.reading is None for each in seen.groups):
            # The first answer, or its absence, is a moment away, and it starts the next turn. Without it a restarted
            # operator would call an engine that serves unavailable, and make another.
            return STALE_S
        if unsupported:
            seen = replace(seen, taken=frozenset())  # Nothing is made, so nothing needs another name.
        step: Step | None = None
        parts: tuple[Lineage, ...] = ()
        if resolved is not None:
            step, parts = await self._roller.next(key, document, resolved, seen, memory, rollout, now=now, clock=clock)
        places = tuple(slot for lineage in parts for slot in lineage.slots)
        wanted = None if unsupported else resolved
        settings, model = self._settings, inspection.model
        named = service or without_spec(document)
        planned = plan(wanted, seen, parts, step, memory, rollout, settings, named, model, now=now, clock=clock)
        if service is not None and accepted.reason is Reason.NOT_ALLOWED and not unsupported:
            planned = held_plan(planned, service, seen, settings.namespace, now=now)
        mounting_s = self._mounting_s(key, seen.groups, inspection, now)
        refused: Refused | None = None
        try:
            applied = replace(planned, wanted=inspection.wanted + planned.wanted)
            await self._applier.carry_out(key, applied, _LATE_MOUNT_CHECK_S if mounting_s is not None else _REAPPLY_S)
        except Refused as error:
            refused = error
        if accepted is VALID and refused is not None:
            accepted = Verdict(reason=Reason.APPLY_REFUSED, message=str(refused))
        elif accepted is VALID and unsupported:
            accepted = Verdict(reason=Reason.UNSUPPORTED_KUBERAY, message=unsupported)
        computed = status(
            resolved,
            accepted,
            seen,
            places,
            # Without KubeRay nothing is done of it, so nothing of it is remembered either.
            None if unsupported else step,
            missing=inspection.verdict,
            model=model,
            generation=document["metadata"]["generation"],
            previous=previous,
            memory=memory,
            now=now,
            clock=clock,
        )
        unwritten_s = await self._statuses.write(key, document, computed)
        waits = [(each - clock).total_seconds() for each in (*planned.waits, *seen.waits)]
        if unwritten_s is not None:
            waits.append(unwritten_s)
        if not await self._statuses.tell(key):
            waits.append(_SOON_S)
        # Over a spec that cannot be used, or without KubeRay, nothing is made anew.
        if wanted is not None and any(
            slot.group and slot.failure and slot.failure.uid == slot.group.uid for slot in places
        ):
            waits.append(_NEXT_TURN_S)
        if inspection.look_again_s is not None:
            waits.append(inspection.look_again_s)
        if wanted is not None and step is not None and step.look_again_s is not None:
            waits.append(step.look_again_s)
        look_s = min([self._next_look_s(seen.groups, mounting_s, now), *waits])
        if refused is not None:
            # What was refused is tried again ever later; what time alone changes is not to wait for that.
            self._queue.add_after(key, max(look_s, _REFUSED_LOOK_S))
            raise refused
        return look_s

    def _mounting_s(self, key: ServiceKey, groups: Sequence[Group], inspection: Inspection, now: float) -> float | None:
        """For how many seconds a pod has waited, for a volume perhaps; None when none does."""
        if not inspection.waiting and not any(each.is_mounting for group in groups for each in group.pods):
            self._mounting_since.pop(key, None)
            return None
        return now - self._mounting_since.setdefault(key, now)

    def _next_look_s(self, groups: Sequence[Group], mounting_s: float | None, now: float) -> float:
        readings = [group.reading for group in groups if group.reading is not None]
        # An engine that gets on with nothing makes no news. One that is well does when it ceases to be.
        is_quiet = not readings or all(is_well(group, now) for group in groups)
        looks = [REGULAR_S if is_quiet else STALE_S]
        if mounting_s is not None:
            looks.append(_MOUNT_CHECK_S if mounting_s < _MOUNT_NEWS_S else _LATE_MOUNT_CHECK_S)
        # When a silent one is called unreachable depends on time alone.
        silent = [mute_at(reading) - now for reading in readings if reading.failing_since is not None]
        looks += [look_s for mute_in_s in silent for look_s in (mute_in_s, self._poller.look_s()) if look_s > 0]
        return min(looks)

    async def _resolve(self, service: LLMService, image: str, facts: ModelFacts, previous: Manifest) -> Resolved:
        """`resolve`; in a thread where it computes with a model's sizes, which somebody else has chosen."""
        hub = self._settings.hub
        if is_sized(service, facts, previous):
            return resolve(service, image, facts, previous, hub)
        accelerator = service.spec.accelerator
        memory = WITHOUT_CLUSTER
        if accelerator is not None and accelerator.memory is None:
            memory = self.watches.nodes.memory_of(accelerator, service.spec.scheduling.node_selector)
        # Nodes are read here, in the loop that changes them.
        return await self._sizer.run(resolve, service, image, facts, previous, hub, lambda *_: memory)

    async def _inspect(self, key: ServiceKey, previous: Manifest, service: LLMService, clock: datetime) -> Inspection:
        image, hub, pods = self._settings.image(service), self._settings.hub, self._pods.of_service(key)
        jobs = [each for each in self._jobs.of_service(key) if "deletionTimestamp" not in each["metadata"]]
        found = inspect(service, image, hub, previous, jobs, pods, {}, clock)
        if found.is_podless:
            failures = await self._observer.job_failures(key)
        elif found.waiting:
            failures = await self._observer.mount_failures(key, found.waiting)
        else:
            return found
        return inspect(service, image, hub, previous, jobs, pods, failures, clock)
