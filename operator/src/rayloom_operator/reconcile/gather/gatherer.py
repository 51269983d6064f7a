"""Gathers the situation of a service: the only step of a reconcile that reads the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from rayloom_operator.api.spec import without_spec
from rayloom_operator.api.status import Reason, stored_rollout
from rayloom_operator.decide.inspection import Inspection
from rayloom_operator.decide.recovery import Memory, remembered
from rayloom_operator.decide.rollout.planner import Planned
from rayloom_operator.decide.rollout.revisions import RevisionPlaces
from rayloom_operator.decide.scaling.scaler import ScalingDecision
from rayloom_operator.decide.scaling.view import may_be_empty
from rayloom_operator.decide.settings import Settings
from rayloom_operator.decide.situation import Situation
from rayloom_operator.kube.client import Kube
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.observed import Observed
from rayloom_operator.observe.observer import Observer
from rayloom_operator.observe.poller import EnginePoller
from rayloom_operator.observe.watches import Watches
from rayloom_operator.reconcile.gather.inspector import Inspector
from rayloom_operator.reconcile.gather.lookups import RolloutLookups
from rayloom_operator.reconcile.gather.scaling import ScalingGatherer
from rayloom_operator.reconcile.gather.sizer import Sizer
from rayloom_operator.reconcile.gather.spec_reader import ParsedSpec, SpecReader
from rayloom_operator.times import Now

# Used while the spec cannot be read: recovery.nodeLossSeconds is unknown then, so no node counts as lost.
_FOREVER = timedelta(days=36_500)


class Gatherer:
    """Gathers the situations of services.

    Not thread-safe: used in one event loop. The gatherer's only state is, for each service, the time at which a pod
    began to wait for volumes.
    """

    def __init__(
        self, kube: Kube, settings: Settings, watches: Watches, poller: EnginePoller, observer: Observer
    ) -> None:
        self._settings = settings
        self._watches = watches
        self._poller = poller
        self._observer = observer
        self._sizer = Sizer()
        self._lookups = RolloutLookups(kube, settings, observer, self._sizer)
        self._inspector = Inspector(kube, settings, watches, observer.events)
        self._scaling = ScalingGatherer(kube, settings.windows, poller.interval_s)
        self._specs = SpecReader(settings, watches, self._inspector, self._lookups, self._sizer)
        self._mounting_since: dict[ServiceKey, float] = {}  # event loop time at which a pod began to wait

    def lead(self) -> None:
        """Called when this process begins to lead. The watches are in sync by then."""
        self._inspector.lead()

    def close(self) -> None:
        """Stops the sizing thread."""
        self._sizer.close()

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted service."""
        self._mounting_since.pop(key, None)
        self._lookups.forget(key)
        self._scaling.forget(key)
        self._inspector.forget(key)

    async def gather(self, key: ServiceKey, document: Manifest) -> Situation | None:
        """Returns the situation of the LLMService in `document`.

        Returns None while the first poll of an engine is still running. Without the result of this poll, a restarted
        operator would believe that a serving engine does not serve.
        """
        now = Now(wall=datetime.now(UTC), mono=asyncio.get_running_loop().time())
        previous = document.get("status", {})
        memory, rollout = remembered(previous), stored_rollout(previous)
        kuberay_problem = self._watches.kuberay_problem
        parsed = await self._specs.read(key, document, now)
        observed = await self._observe(key, document, parsed, memory, now)
        if _awaits_first_answer(observed):
            return None
        if kuberay_problem:
            # No RayCluster can be created without KubeRay, so it does not matter which names are taken.
            observed = replace(observed, taken=frozenset())
        planned: Planned | None = None
        revisions: tuple[RevisionPlaces, ...] = ()
        if parsed.resolved is not None:
            planned, revisions = await self._lookups.next(
                key, document, parsed.resolved, observed, memory, rollout, now=now
            )
        scaling: ScalingDecision | None = None
        can_scale = parsed.accepted.reason is Reason.VALID and not kuberay_problem
        if can_scale and parsed.resolved is not None and planned is not None:
            scaling = await self._scaling.next(key, document, parsed.resolved.service.spec, observed, planned, now)
        return Situation(
            now=now,
            settings=self._settings,
            generation=document["metadata"]["generation"],
            previous=previous,
            memory=memory,
            rollout=rollout,
            service=parsed.service or without_spec(document),
            accepted=parsed.accepted,
            spec_requeue_s=parsed.requeue_after_s,
            inspection=parsed.inspection,
            resolved=parsed.resolved,
            observed=observed,
            kuberay_problem=kuberay_problem,
            mounting_s=self._mounting_s(key, observed, parsed.inspection, now),
            retry_interval_s=self._poller.retry_interval_s(),
            step=planned.step if planned is not None else None,
            revisions=revisions,
            scaling=scaling,
            sample_s=self._scaling.sample_s(),
        )

    async def _observe(
        self, key: ServiceKey, document: Manifest, parsed: ParsedSpec, memory: Memory, now: Now
    ) -> Observed:
        created = [name for name, each in memory.items() if each.state != "BackOff"]
        node_loss = _FOREVER
        if parsed.service is not None:
            node_loss = timedelta(seconds=parsed.service.spec.recovery.node_loss_seconds)
        polls_gateways = parsed.service is not None and may_be_empty(parsed.service.spec)
        return await self._observer.observe(
            key, document["metadata"]["uid"], created, node_loss, now.wall, polls_gateways=polls_gateways
        )

    def _mounting_s(self, key: ServiceKey, observed: Observed, inspection: Inspection, now: Now) -> float | None:
        """Returns the seconds that a pod has waited, perhaps for a volume; None if no pod waits."""
        pods = (*observed.gateways, *(pod for replica in observed.replicas for pod in replica.pods))
        is_mounting = any(pod.is_mounting for pod in pods)
        if not is_mounting and not inspection.waiting:
            self._mounting_since.pop(key, None)
            return None
        return now.mono - self._mounting_since.setdefault(key, now.mono)


def _awaits_first_answer(observed: Observed) -> bool:
    return any(each.head is not None and each.head.ip and each.reading is None for each in observed.replicas)
