"""One reconcile of an LLMService: gather, decide, carry out, write the status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from rayloom_operator.api.accelerator_memory import WITHOUT_CLUSTER
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.spec import LLMService, parse, without_spec
from rayloom_operator.api.status import Reason, stored_model, stored_rollout
from rayloom_operator.decide.held import held_plan
from rayloom_operator.decide.inspection import Inspection, Tried, has_unfinished, inspect
from rayloom_operator.decide.plan import Settings, plan
from rayloom_operator.decide.recovery import remembered
from rayloom_operator.decide.refresh import Refreshes
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.rollout.revisions import Lineage
from rayloom_operator.decide.status import VALID, status
from rayloom_operator.errors import DoesNotFit, MemoryUnknown, NotAllowed, Refused, SpecError
from rayloom_operator.kube.client import Kube, KubeError
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.observed import Group, Verdict
from rayloom_operator.observe.observer import Observer
from rayloom_operator.observe.poller import EnginePoller
from rayloom_operator.observe.verdict import STALE_S, is_well, mute_at
from rayloom_operator.observe.watches import Watches
from rayloom_operator.reconcile.applier import Applier
from rayloom_operator.reconcile.lookups import Roller
from rayloom_operator.reconcile.sizer import Sizer
from rayloom_operator.reconcile.status_writer import StatusWriter
from rayloom_operator.reconcile.work_queue import REGULAR_S
from rayloom_operator.resolve.resolved import Resolved, is_sized, resolve
from rayloom_operator.times import Now

logger = logging.getLogger(__name__)

# Objects without a watch, such as ConfigMaps, are applied again so often, because somebody may have deleted them.
_REAPPLY_S = 1800.0
# Kubelets report a mount failure only in an Event, so Events are read while a pod waits: often during the first
# minute. The ConfigMap or Secret that a head mounts may have been deleted: objects are applied again as often.
_MOUNT_CHECK_S = 2.0
_LATE_MOUNT_CHECK_S = 10.0
_MOUNT_NEWS_S = 60.0
# The requeue for what is not known yet.
_SOON_S = 1.0
# A failure that was written to the status is acted on in a reconcile of its own, that soon.
_NEXT_TURN_S = 0.2
_REFUSED_LOOK_S = 2.0
# Reasons for a valid spec that cannot be used.
_REASONS = ((DoesNotFit, Reason.DOES_NOT_FIT), (NotAllowed, Reason.NOT_ALLOWED))
# Nodes get the labels of their accelerators some time after they joined.
_NODES_LOOK_S = 10.0


class Reconciler:
    """Lives in one event loop. `requeue_after` puts a service into the work queue after so many seconds."""

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        *,
        watches: Watches,
        poller: EnginePoller,
        drift: Drift,
        statuses: StatusWriter,
        requeue_after: Callable[[ServiceKey, float], None],
    ) -> None:
        self._settings = settings
        self._watches = watches
        self._poller = poller
        self._statuses = statuses
        self._requeue_after = requeue_after
        self._observer = Observer(kube, watches, poller, settings.admin_tokens)
        self._applier = Applier(kube, drift, self._observer.note_cluster, poller.told)
        self._sizer = Sizer()
        self._roller = Roller(kube, settings, self._observer, self._sizer)
        self._mounting_since: dict[ServiceKey, float] = {}
        self._kube = kube
        self._refreshes = Refreshes()

    def lead(self) -> None:
        """Takes the Jobs that run when this operator begins to lead."""
        jobs = self._watches.jobs
        running = [key for key in jobs.keys() if has_unfinished(jobs.of_service(key))]  # noqa: SIM118 - it is no dict
        self._refreshes.found(running, asyncio.get_running_loop().time())

    def close(self) -> None:
        """Starts no more computations of sizes."""
        self._sizer.close()

    async def forget(self, key: ServiceKey) -> float | None:
        """Drops everything that is kept of a deleted service.

        Returns after how many seconds to call this again; None once nothing is left.
        """
        self._applier.forget(key)
        self._mounting_since.pop(key, None)
        self._statuses.forget(key)
        self._roller.forget(key)
        self._refreshes.forget(key)
        return await self._observer.forget(key, datetime.now(UTC))

    async def reconcile(self, key: ServiceKey, document: Manifest) -> float:
        now = Now(wall=datetime.now(UTC), mono=asyncio.get_running_loop().time())
        previous = document.get("status", {})
        unsupported = self._watches.kuberay_problem
        if not unsupported and not self._watches.clusters.is_synced.is_set():
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
            inspection = await self._inspect(key, previous, service, now)
            if inspection.facts is not None:
                image = self._settings.image(service)
                resolved = await self._resolve(service, image, inspection.facts, previous)
                resolved = await self._roller.with_kept_image(key, document, resolved, previous)
        except SpecError as error:
            if isinstance(error, MemoryUnknown):
                self._requeue_after(key, _NODES_LOOK_S)
            reason = next((each for kind, each in _REASONS if isinstance(error, kind)), Reason.INVALID_SPEC)
            accepted = Verdict(reason=reason, message="; ".join(error.problems))
        memory, rollout = remembered(previous), stored_rollout(previous)
        made = [name for name, each in memory.items() if each.state != "BackOff"]
        seen = await self._observer.observe(key, document["metadata"]["uid"], made, patience, now.wall)
        if any(each.head and each.head.ip and each.reading is None for each in seen.groups):
            # The first answer, or its absence, is a moment away, and it starts the next turn. Without it a restarted
            # operator would call an engine that serves unavailable, and make another.
            return STALE_S
        if unsupported:
            seen = replace(seen, taken=frozenset())  # Nothing is made, so nothing needs another name.
        step: Step | None = None
        parts: tuple[Lineage, ...] = ()
        if resolved is not None:
            step, parts = await self._roller.next(key, document, resolved, seen, memory, rollout, now=now)
        places = tuple(slot for lineage in parts for slot in lineage.slots)
        wanted = None if unsupported else resolved
        settings, model = self._settings, inspection.model
        named = service or without_spec(document)
        planned = plan(wanted, seen, parts, step, memory, rollout, settings, named, model, now=now)
        if service is not None and accepted.reason is Reason.NOT_ALLOWED and not unsupported:
            planned = held_plan(planned, service, seen, settings.namespace, now=now.mono)
        mounting_s = self._mounting_s(key, seen.groups, inspection, now.mono)
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
        )
        unwritten_s = await self._statuses.write(key, document, computed)
        waits = [(each - now.wall).total_seconds() for each in (*planned.waits, *seen.waits)]
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
        look_s = min([self._next_look_s(seen.groups, mounting_s, now.mono), *waits])
        if refused is not None:
            # What was refused is tried again ever later; what time alone changes is not to wait for that.
            self._requeue_after(key, max(look_s, _REFUSED_LOOK_S))
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
            memory = self._watches.nodes.memory_of(accelerator, service.spec.scheduling.node_selector)
        # Nodes are read here, in the loop that changes them.
        return await self._sizer.run(resolve, service, image, facts, previous, hub, lambda *_: memory)

    async def _inspect(self, key: ServiceKey, previous: Manifest, service: LLMService, now: Now) -> Inspection:
        image, hub, pods = self._settings.image(service), self._settings.hub, self._watches.pods.of_service(key)
        jobs = [each for each in self._watches.jobs.of_service(key) if "deletionTimestamp" not in each["metadata"]]
        may_refresh = self._refreshes.may_start(key, image, now.mono)
        tried = Tried(jobs, pods)
        found = inspect(service, image, hub, previous, tried, now.wall, may_refresh)
        self._refreshes.note(key, image, found.refresh, now.mono)
        if found.refresh_job is not None:
            await self._make_refresh_job(key, found.refresh_job)
        if found.is_podless:
            failures = await self._observer.job_failures(key)
        elif found.waiting:
            failures = await self._observer.mount_failures(key, found.waiting)
        else:
            return found
        return inspect(service, image, hub, previous, replace(tried, failures=failures), now.wall)

    async def _make_refresh_job(self, key: ServiceKey, job: Manifest) -> None:
        """Makes a Job that no one waits for: its service runs, so a refusal of it is one line of the log."""
        try:
            await self._kube.create(job)
        except KubeError as error:
            logger.warning("%s/%s: the Job that inspects the model again was refused: %s", *key, error)
