"""The reconcile of an LLMService: gather, decide, carry out, write the status."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from rayloom_operator.decide.decision import Decision, decide
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
from rayloom_operator.reconcile.apply.applier import Applier
from rayloom_operator.reconcile.gather.gatherer import Gatherer
from rayloom_operator.reconcile.status_writer import StatusWriter

# Requeue after these seconds for causes that end soon: RayClusters not yet listed, an API server without an answer.
_SOON_S = 1.0
# A refused object is retried at growing intervals. Changes by time alone are reconciled before, but not at once.
_REFUSED_S = 2.0


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
        self._watches = watches
        self._statuses = statuses
        self._requeue_after = requeue_after
        self._observer = Observer(kube, watches, poller, settings.admin_tokens)
        self._applier = Applier(kube, drift, self._observer.note_cluster, poller.note_drain)
        self._gatherer = Gatherer(kube, settings, watches, poller, self._observer)

    def lead(self) -> None:
        """This process begins to lead, and the watches are in sync."""
        self._gatherer.lead()

    def close(self) -> None:
        """Starts no more computations of sizes."""
        self._gatherer.close()

    async def forget(self, key: ServiceKey) -> float | None:
        """Drops everything that is kept of a deleted service.

        Returns after how many seconds to call this again; None once nothing is left.
        """
        self._applier.forget(key)
        self._statuses.forget(key)
        self._gatherer.forget(key)
        return await self._observer.forget(key, datetime.now(UTC))

    async def reconcile(self, key: ServiceKey, document: Manifest) -> float:
        """Brings the cluster one step closer to the spec of the LLMService in `document`.

        Returns after how many seconds to reconcile again, unless an event comes before. Raises Refused for an object
        that the API server will not take before a user changes something, and other OperatorErrors to try again.
        """
        # 1. Gather: read the cluster.
        if not self._watches.kuberay_problem and not self._watches.clusters.is_synced.is_set():
            return _SOON_S  # KubeRay was installed again a moment ago, and existing RayClusters are not listed yet.
        situation = await self._gatherer.gather(key, document)
        if situation is None:
            return STALE_S  # The first answer of an engine, or its absence, starts the next reconcile.

        # 2. Decide: a pure function.
        decision = decide(situation)

        # 3. Carry out: routes, objects, drains, deletions.
        refused = await self._carry_out(key, decision)

        # 4. Write the status, and Events about its changes.
        after_s = [decision.requeue_after_s]
        unwritten_s = await self._statuses.write(key, document, status(situation, str(refused or "")))
        if unwritten_s is not None:
            after_s.append(unwritten_s)
        if not await self._statuses.send_events(key):
            after_s.append(_SOON_S)

        # 5. Requeue.
        if refused is not None:
            self._requeue_after(key, max(min(after_s), _REFUSED_S))
            raise refused
        return min(after_s)

    async def _carry_out(self, key: ServiceKey, decision: Decision) -> Refused | None:
        """Returns the refusal of an object instead of raising it: the status says it as well."""
        try:
            await self._applier.carry_out(key, decision.plan, decision.reapply_after_s)
        except Refused as error:
            return error
        return None
