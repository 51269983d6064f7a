"""Reads the inputs of a service: its spec, the facts of its model, and the resolved specs of its engine replicas."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.api.accelerator_memory import WITHOUT_CLUSTER
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.spec import LLMService, parse
from rayloom_operator.api.status import Reason, stored_model
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
from rayloom_operator.resolve.resolved import Resolved, is_sized, resolve
from rayloom_operator.times import Now

# Reasons for a spec that is valid in itself and cannot be used here.
_REASONS = ((DoesNotFit, Reason.DOES_NOT_FIT), (NotAllowed, Reason.NOT_ALLOWED))
# Nodes get the labels of their accelerators some time after they joined, and a label causes no event of the service.
_NODE_LABELS_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedSpec:
    """The demands of a service, as far as its spec could be read."""

    service: LLMService | None  # None while the spec cannot be read
    accepted: Verdict  # VALID, or why the spec cannot be used
    inspection: Inspection
    resolved: Resolved | None  # None while the spec cannot be used or the model is not known
    requeue_after_s: float | None  # after so many seconds the answer may be another one; None: not by time alone


class SpecReader:
    """Lives in one event loop."""

    def __init__(
        self, settings: Settings, watches: Watches, inspector: Inspector, lookups: RolloutLookups, sizer: Sizer
    ) -> None:
        self._settings = settings
        self._watches = watches
        self._inspector = inspector
        self._lookups = lookups
        self._sizer = sizer

    async def read(self, key: ServiceKey, document: Manifest, now: Now) -> ParsedSpec:
        """Returns the demands of the LLMService in `document`. A fault of its spec is in `accepted`, never raised."""
        previous = document.get("status", {})
        service: LLMService | None = None
        inspection: Inspection | None = None
        resolved: Resolved | None = None
        accepted = VALID
        requeue_after_s = None
        try:
            service = parse(document)
            self._settings.permissions.check(service)
            inspection = await self._inspector.inspect(key, previous, service, now)
            if inspection.facts is not None:
                resolved = await self._resolve(service, inspection.facts, previous)
                resolved = await self._lookups.with_kept_image(key, document, resolved, previous)
        except SpecError as error:
            reason = next((each for kind, each in _REASONS if isinstance(error, kind)), Reason.INVALID_SPEC)
            accepted = Verdict(reason=reason, message="; ".join(error.problems))
            requeue_after_s = _NODE_LABELS_S if isinstance(error, MemoryUnknown) else None
        return ParsedSpec(
            service=service,
            accepted=accepted,
            # The facts that are stored stay stored while the spec cannot be used.
            inspection=inspection or Inspection(model=stored_model(previous)),
            resolved=resolved,
            requeue_after_s=requeue_after_s,
        )

    async def _resolve(self, service: LLMService, facts: ModelFacts, previous: Manifest) -> Resolved:
        """Runs `resolve`; in a thread where it computes with a model's sizes, which the model's author has chosen."""
        image, hub = self._settings.image(service), self._settings.hub
        if is_sized(service, facts, previous):
            return resolve(service, image, facts, previous, hub)
        accelerator = service.spec.accelerator
        memory = WITHOUT_CLUSTER
        if accelerator is not None and accelerator.memory is None:
            # Nodes are read here, in the event loop that changes them.
            memory = self._watches.nodes.memory_of(accelerator, service.spec.scheduling.node_selector)
        return await self._sizer.run(resolve, service, image, facts, previous, hub, lambda *_: memory)
