"""The places for engines of each revision that has engines or shall have some. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayloom_operator.decide.recovery import Memory, Slot, slots
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.observe.observed import Observed
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.times import Now


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The places for engines of one revision."""

    revision: str
    resolved: Resolved | None  # what its engines are made from; None where no ControllerRevision has it: none is made
    slots: tuple[Slot, ...]
    num_new: int  # empty places that may be filled now


def old_revisions(step: Step) -> list[str]:
    """The revisions other than the spec's of which the step may make engines."""
    state = step.state
    return sorted({*state.counts, state.current_revision} - {state.update_revision, ""})


def lineages(
    resolved: Resolved,
    old: Mapping[str, Resolved],
    seen: Observed,
    memory: Memory,
    step: Step,
    *,
    now: Now,
) -> tuple[Lineage, ...]:
    """The places, by revision.

    `resolved` is the spec's, and `old` has what engines of other revisions are made from. Terminating engines have no
    place: they are neither counted nor recreated.
    """
    state = step.state
    made_from = {**old, state.update_revision: resolved}
    return tuple(
        Lineage(
            revision=each,
            resolved=made_from.get(each),
            slots=slots(
                made_from.get(each, resolved),
                each,
                seen,
                memory,
                number=state.counts.get(each, 0),
                num_new=step.make.get(each, 0),
                leaving=state.terminating.keys(),
                now=now,
            ),
            num_new=step.make.get(each, 0),
        )
        for each in sorted({*state.counts, *(group.revision for group in seen.groups)})
    )
