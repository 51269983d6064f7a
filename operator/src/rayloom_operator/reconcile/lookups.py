"""Looks up what a roll needs beside what is cached, and asks the planner what comes next."""

from __future__ import annotations

from dataclasses import replace

from rayloom_operator.api.rollout import RolloutState
from rayloom_operator.decide.plan import Settings
from rayloom_operator.decide.recovery import Memory
from rayloom_operator.decide.rollout.planner import Step, next_step
from rayloom_operator.decide.rollout.revisions import Lineage, lineages, old_revisions
from rayloom_operator.decide.rollout.view import look, order_of
from rayloom_operator.kube.client import Kube
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.observed import Group, Observed
from rayloom_operator.observe.observer import Observer
from rayloom_operator.reconcile.old_specs import OldSpecs
from rayloom_operator.reconcile.sizer import Sizer
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.resolve.revision import revision, with_kept_image
from rayloom_operator.times import Now


class Roller:
    """Lives in one event loop."""

    def __init__(self, kube: Kube, settings: Settings, observer: Observer, sizer: Sizer) -> None:
        self._old_specs = OldSpecs(kube, settings.hub, settings.permissions, sizer)
        self._observer = observer

    def forget(self, key: ServiceKey) -> None:
        """The service is gone."""
        self._old_specs.forget(key)

    async def with_kept_image(
        self, key: ServiceKey, document: Manifest, resolved: Resolved, previous: Manifest
    ) -> Resolved:
        """`resolved` with the default image of the time when this spec was first applied, also where it is the spec of
        before a roll, which comes back. `previous` is the status as it was written last."""
        current, update = previous.get("currentRevision", ""), previous.get("updateRevision", "")
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
    ) -> tuple[Step, tuple[Lineage, ...]]:
        """What to do next, and the engines of each revision. `rollout` is what was written of rolls."""
        order = order_of(resolved, revision(resolved))
        step = next_step(order, rollout, look(seen, memory, order.revision, now=now.mono), now.wall)
        if step.drain or step.delete:
            # What ends requests is not done by the word of a watch alone, which may be behind or broken.
            found = await self._observer.found(key)
            groups = (replace(each, is_found=each.is_found or _uid(each) in found) for each in seen.groups)
            seen = replace(seen, groups=tuple(groups))
            step = next_step(order, rollout, look(seen, memory, order.revision, now=now.mono), now.wall)
        old = await self._old_specs.of(key, document, old_revisions(step))
        return step, lineages(resolved, old, seen, memory, rollout, step, now=now)


def _uid(group: Group) -> str:
    """Of its head pod; empty while there is none."""
    return group.head.uid if group.head is not None else ""
