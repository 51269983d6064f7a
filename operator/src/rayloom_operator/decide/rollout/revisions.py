"""The places for engines of each revision that has engines or should have some. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.recovery import Memory, Need, Place, places
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.observe.observed import Observed
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.times import Now


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionPlaces:
    """The places for engines of one revision."""

    revision: str
    resolved: Resolved | None  # spec of the revision; None if no ControllerRevision stores it
    places: tuple[Place, ...]
    num_new: int  # empty places that may be filled now


def old_revisions(step: Step) -> list[str]:
    """Returns the revisions whose engines the step may create, except the spec's revision."""
    state = step.state
    return sorted({*state.counts, state.current_revision} - {state.update_revision, ""})


def revision_places(
    resolved: Resolved,
    old: Mapping[str, Resolved],
    observed: Observed,
    memory: Memory,
    stored: RolloutState,
    step: Step,
    *,
    now: Now,
) -> tuple[RevisionPlaces, ...]:
    """Returns the places, by revision.

    `resolved` is the current spec, and `old` has the stored specs of other revisions.

    An engine has no place if the state of `step` or the `stored` state names the engine as terminating. Such an engine
    is not counted and not recreated. The stored state also names engines that are deleted by now. Without the stored
    state, entries of deleted engines in `memory` could take the places of failed engines.
    """
    state = step.state
    leaving = stored.terminating.keys() | state.terminating.keys()
    made_from = {**old, state.update_revision: resolved}
    found = []
    for revision in sorted({*state.counts, *(replica.revision for replica in observed.replicas)}):
        num_new = step.make.get(revision, 0)
        need = Need(
            revision=revision,
            number=state.counts.get(revision, 0),
            num_new=num_new if step.is_stored else None,
            leaving=leaving,
        )
        found.append(
            RevisionPlaces(
                revision=revision,
                resolved=made_from.get(revision),
                places=places(made_from.get(revision, resolved), need, observed, memory, now),
                num_new=num_new,
            )
        )
    return tuple(found)
