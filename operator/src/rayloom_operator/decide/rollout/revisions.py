"""The engines of each revision that is to have some, or has: how many the roll wants, and what became of each. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayloom_operator.api.rollout import RolloutState
from rayloom_operator.decide.recovery import Memory, Slot, slots
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.observe.observed import Observed
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.times import Now


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The engines of one revision."""

    revision: str
    resolved: Resolved | None  # what they are made from; None where nobody knows any more: then none is made
    slots: tuple[Slot, ...]
    num_new: int  # so many of the empty places may be filled now


def old_revisions(step: Step) -> list[str]:
    """Those beside the spec's of which engines may have to be made."""
    state = step.state
    return sorted({*state.counts, state.current_revision} - {state.update_revision, ""})


def lineages(
    resolved: Resolved,
    old: Mapping[str, Resolved],
    seen: Observed,
    memory: Memory,
    rollout: RolloutState,
    step: Step,
    *,
    now: Now,
) -> tuple[Lineage, ...]:
    """By revision. `resolved` is the spec's, `old` what engines of other revisions are made from, `rollout` what was
    written of the roll, and `step` what comes next."""
    made_from = {**old, step.state.update_revision: resolved}
    # What only one of the two lets go is neither counted nor made anew.
    leaving = rollout.leaving.keys() | step.state.leaving.keys()
    return tuple(
        Lineage(
            revision=each,
            resolved=made_from.get(each),
            slots=slots(
                made_from.get(each, resolved),
                each,
                seen,
                memory,
                number=step.state.counts.get(each, 0),
                num_new=step.make.get(each, 0),
                leaving=leaving,
                now=now,
            ),
            num_new=step.make.get(each, 0),
        )
        for each in sorted({*step.state.counts, *(group.revision for group in seen.groups)})
    )
