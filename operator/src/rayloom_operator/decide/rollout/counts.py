"""Computes how many engines each revision should have. Pure.

The counts are like the replicas of a Deployment's ReplicaSets: engines beyond a revision's count are terminated, and
missing engines are created. Two bounds hold at every moment. At most `replicas + maxSurge` engines exist. No decision
of the planner leaves fewer than `replicas - maxUnavailable` engines available.

| the rollout | engines of the target revision | engines of all other revisions together |
|---|---|---|
| is stopped: paused or halted | its count so far | the rest of `replicas`, or more if maxSurge leaves room |
| has not proven the target revision yet | 1 | `replicas`, or fewer if that engine needs their room |
| has proven it, or rolls back to it | `replicas` | as many as the target revision lacks to reach `min_available` |
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.inputs import Desired, View, is_stopped, target_revision
from rayloom_operator.decide.rollout.terminating import moved_revision, needs_surge


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """The split of the engines between the target revision and all other revisions together."""

    of_target: int
    most_others: int
    least_others: int


def revision_counts(desired: Desired, state: RolloutState, view: View) -> dict[str, int]:
    """Returns the number of engines that each revision should have. Revisions that should have no engine are left
    out."""
    target = target_revision(desired, state)
    current = state.current_revision
    split = _split(desired, state, view)
    counts = {target: split.of_target}
    num_left = split.most_others
    for revision in _others(desired, state, view):
        counts[revision] = min(_num_worth_keeping(desired, state, view, revision), num_left)
        num_left -= counts[revision]
    num_missing = split.least_others - (split.most_others - num_left)
    if num_missing > 0:
        counts[current] = counts.get(current, 0) + num_missing
    if needs_surge(desired, state, view):
        moved = moved_revision(desired, state)
        counts[moved] = counts.get(moved, 0) + 1
    return {revision: number for revision, number in counts.items() if number > 0}


def _split(desired: Desired, state: RolloutState, view: View) -> _Split:
    replicas = desired.replicas
    target = target_revision(desired, state)
    num_decided = _num_decided(desired, state, view)
    if is_stopped(desired, state):
        of_target = min(num_decided, replicas)
        most_others = min(replicas, desired.max_engines - of_target)
        return _Split(of_target=of_target, most_others=most_others, least_others=replicas - of_target)
    if _is_proven(desired, state):
        most_others = max(0, desired.min_available - view.num_available(target))
        if target == state.current_revision:
            # The other revisions have failed, or the spec no longer asks for them: only available engines are kept.
            num_others = sum(engine.is_available for engine in view.engines if engine.revision != target)
            most_others = min(most_others, num_others)
        return _Split(of_target=replicas, most_others=most_others, least_others=0)
    # At first a single engine has to prove the target revision. More than one engine may run if the spec went back to a
    # revision that still has engines.
    of_target = min(max(num_decided, 1), replicas)
    # With maxSurge 0 one old engine makes room for the new engine. With a larger maxSurge all old engines stay.
    most_others = min(replicas, desired.max_engines - of_target)
    least_others = min(replicas - view.num_available(target), most_others)
    return _Split(of_target=of_target, most_others=most_others, least_others=least_others)


def _is_proven(desired: Desired, state: RolloutState) -> bool:
    """Returns True once all engines may become engines of the target revision."""
    is_back = target_revision(desired, state) == state.current_revision
    return is_back or (state.is_promoted and not is_stopped(desired, state))


def _num_decided(desired: Desired, state: RolloutState, view: View) -> int:
    """Returns how many engines of the target revision may run: the revision's stored count, or fewer for lack of room.

    If there are too many engines, for example after `replicas` was lowered, engines of the unproven revision are
    terminated first.
    """
    target = target_revision(desired, state)
    current = state.current_revision
    number = state.counts.get(target, 0)
    if state.is_promoted or target == current:
        return number
    num_old = min(desired.replicas, len(view.of(current)))
    return min(number, max(1, desired.max_engines - num_old))


def _others(desired: Desired, state: RolloutState, view: View) -> list[str]:
    """Returns the revisions other than the target, in the order in which their engines are kept.

    The current revision comes first, because it has proven itself. A failed update revision comes last. Once the target
    is proven, revisions without an available engine come after all others, because their engines would take room that
    the target needs.
    """
    target = target_revision(desired, state)
    current = state.current_revision
    known = state.counts.keys() if target != current else {engine.revision for engine in view.engines}

    def rank(revision: str) -> tuple[bool, bool, bool, str]:
        is_useless = _is_proven(desired, state) and not view.num_available(revision)
        return is_useless, revision != current, revision == state.update_revision, revision

    return sorted({current, *known} - {target}, key=rank)


def _num_worth_keeping(desired: Desired, state: RolloutState, view: View, revision: str) -> int:
    """Returns how many engines of a revision other than the target are kept if there is room for them."""
    current = state.current_revision
    if target_revision(desired, state) == current:
        return view.num_available(revision)
    number = state.counts.get(revision, 0)
    if state.is_promoted:
        return number
    if revision == current:
        # Until the target is proven, every engine of the current revision is kept.
        return max(number, len(view.of(current)))
    return number if is_stopped(desired, state) else view.num_available(revision)
