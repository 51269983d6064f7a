"""The decision of one reconcile: a pure function of the situation.

`decide` runs before the changes are made. `decide.status.status` runs after the changes, because the status also
reports what the API server refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayloom_operator.api.status import Reason
from rayloom_operator.decide.changes.held import held_plan
from rayloom_operator.decide.changes.plan import Plan, plan
from rayloom_operator.decide.requeue import reapply_after_s, requeue_after_s
from rayloom_operator.decide.situation import Situation


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The changes to make now, and the time of the next reconcile."""

    plan: Plan
    reapply_after_s: float  # seconds until applied objects are applied again
    requeue_after_s: float  # seconds until the next reconcile, unless an event triggers a reconcile earlier


def decide(situation: Situation) -> Decision:
    """Returns the decision. Equal situations give equal decisions."""
    planned = plan(situation)
    is_forbidden = situation.accepted.reason is Reason.NOT_ALLOWED
    if is_forbidden and situation.service is not None and not situation.kuberay_problem:
        planned = held_plan(planned, situation.service, situation)
    planned = replace(planned, wanted=(*situation.inspection.wanted, *planned.wanted))
    return Decision(
        plan=planned,
        reapply_after_s=reapply_after_s(situation),
        requeue_after_s=requeue_after_s(situation, planned),
    )
