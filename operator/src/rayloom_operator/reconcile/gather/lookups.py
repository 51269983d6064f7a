"""Reads old specs and EndpointSlices from the API server for a rollout, and calls the planner for the next step."""

from __future__ import annotations

from dataclasses import replace

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.recovery import Memory
from rayloom_operator.decide.rollout.planner import Planned, next_step
from rayloom_operator.decide.rollout.revisions import RevisionPlaces, old_revisions, revision_places
from rayloom_operator.decide.rollout.view import desired_of, view_of
from rayloom_operator.decide.settings import Settings
from rayloom_operator.kube.client import Kube
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.observed import EngineReplica, Observed
from rayloom_operator.observe.observer import Observer
from rayloom_operator.reconcile.gather.old_specs import OldSpecs
from rayloom_operator.reconcile.gather.sizer import Sizer
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.resolve.revision import revision, with_kept_image
from rayloom_operator.times import Now


class RolloutLookups:
    """Returns the next step of a rollout, after it has read the documents on which the step depends.

    These documents are old specs and, before a step that drains or deletes an engine, the service's EndpointSlices. Not
    thread-safe: used in one event loop.
    """

    def __init__(self, kube: Kube, settings: Settings, observer: Observer, sizer: Sizer) -> None:
        self._old_specs = OldSpecs(kube, settings.hub, settings.permissions, sizer)
        self._observer = observer

    def forget(self, key: ServiceKey) -> None:
        """Drops everything that is kept of a deleted service."""
        self._old_specs.forget(key)

    async def with_kept_image(
        self, key: ServiceKey, document: Manifest, resolved: Resolved, previous: Manifest
    ) -> Resolved:
        """Returns `resolved` with the default image that the operator had when this spec was first applied.

        A newer default image changes no running service. If the spec returns to the revision before the rollout,
        `resolved` also gets that revision's image. `previous` is the last written status.
        """
        current = previous.get("currentRevision", "")
        update = previous.get("updateRevision", "")
        resolved = with_kept_image(resolved, previous.get("image", ""), update or current)
        if update in ("", current) or revision(resolved) == update:
            return resolved
        old = (await self._old_specs.of(key, document, (current,))).get(current)
        return resolved if old is None else with_kept_image(resolved, old.image, current)

    async def next(
        self,
        key: ServiceKey,
        document: Manifest,
        resolved: Resolved,
        seen: Observed,
        memory: Memory,
        rollout: RolloutState,
        *,
        now: Now,
    ) -> tuple[Planned, tuple[RevisionPlaces, ...]]:
        """Returns the next step, and the places of each revision. `rollout` is the stored state of the rollout."""
        desired = desired_of(resolved, revision(resolved))
        view = view_of(seen, memory, desired.revision, mono=now.mono)
        step = next_step(desired, rollout, view, now.wall)
        if step.drain or step.delete:
            # A drain or a deletion would end requests of clients that still reach the engine. The watch of
            # EndpointSlices may lag, so the slices are listed from the API server, and the step is computed again.
            found = await self._observer.found(key)
            replicas = (replace(each, is_found=each.is_found or _uid(each) in found) for each in seen.replicas)
            seen = replace(seen, replicas=tuple(replicas))
            view = view_of(seen, memory, desired.revision, mono=now.mono)
            step = next_step(desired, rollout, view, now.wall)
        old = await self._old_specs.of(key, document, old_revisions(step))
        planned = Planned(desired=desired, view=view, step=step)
        return planned, revision_places(resolved, old, seen, memory, rollout, step, now=now)


def _uid(replica: EngineReplica) -> str:
    """Returns the uid of the head pod, or an empty text if there is none."""
    return replica.head.uid if replica.head is not None else ""
