"""Factories for tests of a scheduler that asks a draft model for proposals."""

from __future__ import annotations

from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.speculation.drafter import SpeculationConfig
from rayloom_engine.core.step import StepPlan
from rayloom_engine.core.step_seconds import StepSeconds
from rt_scheduler import make_scheduler

PROMPT = (1, 2, 3)


def proposing_scheduler(num_blocks: int = 11, num_tokens: int = 2, **other) -> Scheduler:
    speculation = SpeculationConfig(num_tokens=num_tokens, min_ngram=1, max_ngram=1, has_draft_model=True)
    return make_scheduler(num_blocks, speculation=speculation, **{"max_num_seqs": 8, **other})


def asked_of(plan: StepPlan) -> list[int | None]:
    return [step.num_proposals for step in plan.slots]


def drafts_of_plan(plan: StepPlan) -> list[int]:
    return [len(step.draft_token_ids) for step in plan.slots]


def costs_of_proposals(proposal_s: float) -> StepSeconds:
    return StepSeconds(decode_only=((1, 1.0),), token_s=0.1, pair_s=0.0, draft_token_s=0.05, passes=((1, proposal_s),))
