"""The reconcile of an LLMService: gather, decide, carry out, write the status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from rayloom_operator.decide.decision import Decision, decide
from rayloom_operator.decide.route import missing_kind, route_status
from rayloom_operator.decide.settings import Settings
from rayloom_operator.decide.status import status
from rayloom_operator.errors import Refused
from rayloom_operator.kube.client import Kube
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.observer import Observer
from rayloom_operator.observe.poller import EnginePoller
from rayloom_operator.observe.verdict import STALE_S
from rayloom_operator.observe.watches import Watches
from rayloom_operator.reconcile.apply.applier import ROUTE_RETRY_S, Applier
from rayloom_operator.reconcile.gather.gatherer import Gatherer
from rayloom_operator.reconcile.status_writer import StatusWriter

# The requeue delay if a short wait is expected: for a list of RayClusters, or for the API server to answer again.
_SOON_S = 1.0
# After a refusal, the work queue retries with a back-off. The next reconcile may come earlier, at the time that the
# decision gives, but not before this many seconds.
_REFUSED_S = 2.0
# A decision that has to be stored in the status before it is carried out requires another reconcile at once. While
# `WritePace` delays the write, that reconcile would make the same decision. So that reconcile waits until the write is
# allowed, but at most this many seconds.
_UNWRITTEN_S = 0.5


class Reconciler:
    """Reconciles one service per call.

    Not thread-safe: used in one event loop. `requeue_after(key, seconds)` puts a service into the work queue after that
    time.
    """

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
        self._watches = watches
        self._statuses = statuses
        self._drift = drift
        self._requeue_after = requeue_after
        self._observer = Observer(kube, watches, poller, settings.admin_tokens, drift)
        self._applier = Applier(kube, drift, self._observer.note_cluster, poller.note_drain, poller.nudge)
        self._gatherer = Gatherer(kube, settings, watches, poller, self._observer)

    def lead(self) -> None:
        """Called when this process begins to lead. The watches are in sync by then."""
        self._gatherer.lead()

    def close(self) -> None:
        """Stops the sizing thread."""
        self._gatherer.close()

    async def forget(self, key: ServiceKey) -> float | None:
        """Drops the state of a deleted service.

        Returns the seconds until `forget` must be called again, or None once the names of the service's RayClusters are
        free again.
        """
        self._applier.forget(key)
        self._statuses.forget(key)
        self._gatherer.forget(key)
        return await self._observer.forget(key, datetime.now(UTC))

    async def reconcile(self, key: ServiceKey, document: Manifest) -> float:
        """Brings the cluster one step closer to the spec of the LLMService in `document`.

        Returns the seconds until the next reconcile, unless an event comes before. Raises Refused if the API server
        refuses an object until a user changes something, and other OperatorErrors if a retry may help.
        """
        # 1. Gather: read the cluster.
        if not self._watches.kuberay_problem and not self._watches.clusters.is_synced.is_set():
            return _SOON_S  # KubeRay was reinstalled a moment ago, and existing RayClusters are not listed yet.
        situation = await self._gatherer.gather(key, document)
        if situation is None:
            # An engine's first poll still runs. Its result queues the service again, long before STALE_S have passed.
            return STALE_S

        # 2. Decide: a pure function.
        decision = decide(situation)
        if kind := missing_kind(route_status(situation)):
            self._drift.need_kind(key, kind)

        # 3. Carry out: routes, objects, drains, deletions.
        refused = await self._carry_out(key, decision)
        situation = replace(situation, route_refusal=self._applier.route_refusal(key))
        is_unscaled = refused is not None and not refused.has_scaled
        if is_unscaled and situation.scaling is not None and situation.scaling.write is not None:
            # `replicas` was not written, so the status keeps the scaler's last state.
            situation = replace(situation, scaling=None)
        if situation.scaling is not None:
            self._statuses.metrics.scaling.show(key, situation.scaling.state.desired, situation.scaling.seen)
        elif situation.resolved is not None and situation.resolved.service.spec.autoscaling is None:
            self._statuses.metrics.scaling.forget(key)

        # 4. Write the status, and create Events about its changes.
        after_s = [decision.requeue_after_s]
        unwritten_s = await self._statuses.write(key, document, status(situation, str(refused or "")))
        if unwritten_s is not None:
            after_s = [max(decision.requeue_after_s, min(unwritten_s, _UNWRITTEN_S)), unwritten_s]
        if situation.route_refusal:
            after_s.append(ROUTE_RETRY_S)
        if not await self._statuses.send_events(key):
            after_s.append(_SOON_S)

        # 5. Requeue.
        if refused is not None:
            self._requeue_after(key, max(min(after_s), _REFUSED_S))
            raise refused
        return min(after_s)

    async def _carry_out(self, key: ServiceKey, decision: Decision) -> Refused | None:
        """Carries out the plan. Returns a refusal instead of raising it, because the status has to show it."""
        try:
            await self._applier.carry_out(key, decision.plan, decision.reapply_after_s)
        except Refused as error:
            return error
        return None
