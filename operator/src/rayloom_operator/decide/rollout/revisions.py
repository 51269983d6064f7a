"""The places for engines of each revision that has engines or shall have some. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayloom_operator.decide.recovery import Memory, Need, Place, places
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.observe.observed import Observed
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.times import Now


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionPlaces:
    """The places for engines of one revision."""

    revision: str
    resolved: Resolved | None  # None if no ControllerRevision has the revision's spec: then no engine is created
    places: tuple[Place, ...]
    num_new: int  # empty places that may be filled now


def old_revisions(step: Step) -> list[str]:
    """Returns the revisions other than the spec's of which the step may make engines."""
    state = step.state
    return sorted({*state.counts, state.current_revision} - {state.update_revision, ""})


def revision_places(
    resolved: Resolved,
    old: Mapping[str, Resolved],
    observed: Observed,
    memory: Memory,
    step: Step,
    *,
    now: Now,
) -> tuple[RevisionPlaces, ...]:
    """Returns the places, by revision.

    `resolved` is the spec's, and `old` has the resolved specs of other revisions. Terminating engines have no place:
    they are neither counted nor recreated.
    """
    state = step.state
    made_from = {**old, state.update_revision: resolved}
    found = []
    for revision in sorted({*state.counts, *(replica.revision for replica in observed.replicas)}):
        num_new = step.make.get(revision, 0)
        need = Need(
            revision=revision,
            number=state.counts.get(revision, 0),
            num_new=num_new,
            leaving=state.terminating.keys(),
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
