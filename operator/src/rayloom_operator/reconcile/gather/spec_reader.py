"""Reads a service's spec and the facts of its model, and resolves image and parallelism of its engine replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayloom_operator.api.accelerator_memory import WITHOUT_CLUSTER
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.spec import LLMService, parse
from rayloom_operator.api.status import Reason, stored_model, stored_rollout
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.inspection import Inspection
from rayloom_operator.decide.settings import Settings
from rayloom_operator.errors import DoesNotFit, MemoryUnknown, NotAllowed, SpecError
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.observed import Verdict
from rayloom_operator.observe.watches import Watches
from rayloom_operator.reconcile.gather.inspector import Inspector
from rayloom_operator.reconcile.gather.lookups import RolloutLookups
from rayloom_operator.reconcile.gather.sizer import Sizer
from rayloom_operator.resolve.adapter_commits import stored_commits
from rayloom_operator.resolve.engine_refusals import check_gpus, check_kernels
from rayloom_operator.resolve.resolved import Resolved, is_sized, resolve
from rayloom_operator.times import Now

# Error -> reason in the condition, for a valid spec that cannot be used in this cluster.
_REASONS = ((DoesNotFit, Reason.DOES_NOT_FIT), (NotAllowed, Reason.NOT_ALLOWED))
# A node gets its accelerator labels some time after it joined. A new label queues no service, so the labels are read
# again after this many seconds.
_NODE_LABELS_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedSpec:
    """The result of reading a service's spec."""

    service: LLMService | None  # None while the spec cannot be read
    accepted: Verdict  # VALID, or why the spec cannot be used
    inspection: Inspection
    resolved: Resolved | None  # None while the spec cannot be used or the model is not inspected
    requeue_after_s: float | None  # seconds until the spec is read again without an event; None: never


class SpecReader:
    """Reads specs, and decides the values that a spec leaves open. Not thread-safe: used in one event loop."""

    def __init__(
        self, settings: Settings, watches: Watches, inspector: Inspector, lookups: RolloutLookups, sizer: Sizer
    ) -> None:
        self._settings = settings
        self._watches = watches
        self._inspector = inspector
        self._lookups = lookups
        self._sizer = sizer

    async def read(self, key: ServiceKey, document: Manifest, now: Now) -> ParsedSpec:
        """Reads the LLMService in `document`. A fault of its spec is returned in `accepted`, never raised."""
        previous = document.get("status", {})
        service: LLMService | None = None
        inspection: Inspection | None = None
        resolved: Resolved | None = None
        accepted = VALID
        requeue_after_s = None
        try:
            service = parse(document)
            self._settings.permissions.check(service)
            check_kernels(service)
            # Pods of a service that has served get GPUs in a way that the spec does not show.
            if not stored_rollout(previous).has_served:
                check_gpus(service)
            inspection = await self._inspector.inspect(key, previous, service, now)
            if inspection.facts is not None:
                resolved = await self._resolve(service, inspection.facts, previous)
                resolved = await self._lookups.with_kept_image(key, document, resolved, previous)
                commits = stored_commits(service.spec.model, previous)
                resolved = replace(resolved, adapter_commits=tuple(commits.items()))
        except SpecError as error:
            reason = next((each for kind, each in _REASONS if isinstance(error, kind)), Reason.INVALID_SPEC)
            accepted = Verdict(reason=reason, message="; ".join(error.problems))
            requeue_after_s = _NODE_LABELS_S if isinstance(error, MemoryUnknown) else None
        return ParsedSpec(
            service=service,
            accepted=accepted,
            # While the spec cannot be used, the stored facts of the model are kept.
            inspection=inspection or Inspection(model=stored_model(previous)),
            resolved=resolved,
            requeue_after_s=requeue_after_s,
        )

    async def _resolve(self, service: LLMService, facts: ModelFacts, previous: Manifest) -> Resolved:
        """Calls `resolve`, in the sizing thread if a sizing has to be computed: a sizing may take long."""
        image, hub = self._settings.image(service), self._settings.hub
        if is_sized(service, facts, previous):
            return resolve(service, image, facts, previous, hub)
        accelerator = service.spec.accelerator
        memory = WITHOUT_CLUSTER
        if accelerator is not None and accelerator.memory is None:
            # The memory is read here and not in the sizing thread, because the event loop changes the nodes.
            memory = self._watches.nodes.memory_of(accelerator, service.spec.scheduling.node_selector)
        return await self._sizer.run(resolve, service, image, facts, previous, hub, lambda *_: memory)
