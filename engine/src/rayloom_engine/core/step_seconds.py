"""StepSeconds: the times of the parts of a step. StepMeter has measured these times in earlier steps.

    seconds of a step = decode_s(number of decodes) + for each token of a prompt: token_s + pair_s x positions it sees

A decode is a sequence with one token in the step. The costs of a prompt's tokens are proportional to the number of
their floating-point operations (StepWork). So a single measured number, the seconds per operation, gives token_s and
pair_s. An operation takes longer in a chunk of 16 tokens than in a chunk of 512. So the number is measured in real
steps, with the chunk sizes that the scheduler chooses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rayloom_engine.core.step import DraftWork, StepPlan
from rayloom_engine.core.step_work import StepWork

# The prompts of a step are assumed to take at least this part of the step's time, even if they did not make the step
# measurably longer.
_LEAST_PART = 0.01
# One step never lowers the seconds of an operation below this share of the previous value. Chunks must not grow faster
# than their costs are measured: a few more tokens may cost little beside decodes, but many more may cost a lot.
_MOST_DROP = 0.9
# The measured time of the decodes counts as old once more than this many steps with prompts have followed the last step
# without prompts. Only steps with about the same number of decodes (the same bit length) count.
_OLD_AFTER = 64
# If prompts take more than this many times the time of the decodes, the step does not show the time of the decodes.
_MOST_PROMPTS = 2
# A cost is the median of this many measurements. So a single step that other programs slow down changes nothing.
_NUM_KEPT = 9

# The first passes of the draft model may be slow, and without passes the time is not measured again. So fewer
# measurements do not count. A pass for many slots may take much longer than a pass for one, so the passes for a number
# of slots (the same bit length) have a median of their own.
_LEAST_PASSES = 3
# A pass of the draft model takes a least time, whatever the number of its tokens. So a pass with fewer tokens does not
# show the time of a prompt's token.
_LEAST_CAUGHT_UP = 16

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds that parts of a step take."""

    decode_only: tuple[tuple[int, float], ...]  # (decodes, seconds of a step with these alone); ascending, not empty
    token_s: float  # seconds of a prompt's token; > 0
    pair_s: float  # seconds of a prompt's token for each position that it attends to
    draft_token_s: float | None = None  # seconds of a draft token beside decodes; None: not measured yet
    # (slots with a proposal, seconds of a pass of the draft model); ascending; empty: not measured, or no draft model
    passes: tuple[tuple[int, float], ...] = ()
    draft_prompt_s: float | None = None  # seconds of a prompt's token in the draft model; None: as for `passes`

    def __post_init__(self) -> None:
        assert self.decode_only, "the costs of no decode are known"
        assert self.token_s > 0, "a token takes time"

    def decode_s(self, num_decodes: int) -> float:
        """Returns the seconds of a step with `num_decodes` decodes and no tokens of prompts.

        The result is extrapolated from the nearest smaller number of decodes that was measured.
        """
        nearest, seconds = _nearest(self.decode_only, num_decodes)
        return seconds + max(0, num_decodes - nearest) * self.token_s

    def pass_s(self, num_served: int) -> float | None:
        """Returns the seconds of a pass of the draft model for `num_served` slots; None if no pass was measured.

        These are the seconds for the nearest smaller number of slots that was measured.
        """
        return _nearest(self.passes, num_served)[1] if self.passes else None

    @property
    def decode_token_cost(self) -> float:
        """Time of a decoded token, in units of `token_s`, in the largest measured step with decodes alone.

        Of all measured steps, this step divides its fixed cost among the most decodes.
        """
        num_decodes, seconds = self.decode_only[-1]
        return seconds / max(1, num_decodes) / self.token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A plan in flight."""

    num_decodes: int
    flops: float  # of its prompts
    num_drafted: int  # draft tokens
    samples: bool  # True if the plan samples a token


class StepMeter:
    """Learns StepSeconds from the plans that have ended."""

    def __init__(self, work: StepWork) -> None:
        self._work = work
        self._plans: deque[_Planned] = deque()  # the plans in flight
        # Steps with decodes alone: bit length of the number of decodes -> (decodes, seconds) of the last such steps
        self._steps: dict[int, deque[tuple[int, float]]] = {}
        self._decode_only: dict[int, tuple[int, float]] = {}  # the medians of `_steps`
        # bit length of the number of decodes -> steps with prompts since the last step without prompts
        self._num_mixed: dict[int, int] = {}
        # seconds per operation of prompts, in each of the last steps
        self._flop_samples: deque[float] = deque(maxlen=_NUM_KEPT)
        self._flop_s = 0.0  # seconds of an operation, computed from `_flop_samples`; 0 = unknown
        # seconds of a draft token in each of the last steps
        self._draft_samples: deque[float] = deque(maxlen=_NUM_KEPT)
        # bit length of the number of slots with a proposal -> (these slots, seconds of a pass) of the last such steps
        self._passes: dict[int, deque[tuple[int, float]]] = {}
        # seconds of a token with which the draft model catches up, in each of the last steps
        self._caught_up_samples: deque[float] = deque(maxlen=_NUM_KEPT)
        self._costs: StepSeconds | None = None

    def costs(self) -> StepSeconds | None:
        """Returns the present costs; None before a step with decodes alone and a step with a prompt were measured."""
        if self._costs is None and self._decode_only and self._flop_s:
            self._costs = StepSeconds(
                decode_only=tuple(sorted(self._decode_only.values())),
                token_s=self._flop_s * self._work.flops_per_token,
                pair_s=self._flop_s * self._work.flops_per_pair,
                draft_token_s=_median(self._draft_samples) if self._draft_samples else None,
                passes=tuple(
                    _medians(passes) for _, passes in sorted(self._passes.items()) if len(passes) >= _LEAST_PASSES
                ),
                draft_prompt_s=_median(self._caught_up_samples) if self._caught_up_samples else None,
            )
        return self._costs

    def submitted(self, plan: StepPlan) -> None:
        num_drafted = sum(len(step.draft_token_ids) for step in plan.slots)
        chunks = [step for step in plan.slots if step.num_tokens > 1 + len(step.draft_token_ids)]
        samples = len(chunks) < len(plan.slots) or any(step.samples for step in chunks)
        self._plans.append(
            _Planned(
                num_decodes=len(plan.slots) - len(chunks),
                flops=self._work.flops(chunks),
                num_drafted=num_drafted,
                samples=samples,
            )
        )

    def ended(self, seconds: float, draft_work: DraftWork | None = None) -> None:
        """Removes the oldest plan in flight.

        `seconds`: the time of its forward pass and of its sampling. `draft_work`: what the draft model has computed. In
        a step with tokens of prompts, the draft model computes these tokens, too, so its time counts as theirs.
        """
        planned = self._plans.popleft()
        num_decodes, flops, num_drafted = planned.num_decodes, planned.flops, planned.num_drafted
        if seconds <= 0 or not planned.samples:
            return  # if no token is sampled, nothing waits for an accelerator, so `seconds` may be too short
        self._costs = None
        if draft_work is not None:
            self._add_draft_work(draft_work)
            if flops:
                seconds += draft_work.catch_up_s
        if num_drafted:
            self._add_drafts(num_decodes, num_drafted, seconds)
        elif not flops:
            self._num_mixed[num_decodes.bit_length()] = 0
            self._add_decodes(num_decodes, seconds)
        elif num_decodes and self._decode_only:
            self._learn_mixed(num_decodes, flops, seconds)
        else:
            self._add_prompts(seconds / flops)

    def _learn_mixed(self, num_decodes: int, flops: float, seconds: float) -> None:
        """Learns from a step with decodes and tokens of prompts: prompts took the time that the decodes did not take.

        If the measured time of the decodes is old, the step does not show whether decodes or prompts became slower. So
        both costs change by the same factor.
        """
        length = num_decodes.bit_length()
        num_mixed = self._num_mixed[length] = self._num_mixed.get(length, 0) + 1
        nearest, decode_s = _nearest(sorted(self._decode_only.values()), num_decodes)
        # operations of the decodes by which this step exceeds the measured step
        more_flops = max(0, num_decodes - nearest) * self._work.flops_per_token
        all_decodes_s = decode_s + more_flops * self._flop_s
        prompts_s = flops * self._flop_s
        if num_mixed > _OLD_AFTER and 0 < prompts_s <= _MOST_PROMPTS * all_decodes_s:
            factor = seconds / (all_decodes_s + prompts_s)
            self._add_decodes(num_decodes, factor * all_decodes_s)
            self._add_prompts(factor * self._flop_s)
        else:
            self._add_prompts(max(seconds - decode_s, _LEAST_PART * seconds) / (flops + more_flops))

    def _add_decodes(self, num_decodes: int, seconds: float) -> None:
        length = num_decodes.bit_length()
        steps = self._steps.setdefault(length, deque(maxlen=_NUM_KEPT))
        steps.append((num_decodes, seconds))
        self._decode_only[length] = _medians(steps)

    def _add_drafts(self, num_decodes: int, num_drafted: int, seconds: float) -> None:
        """Learns from a step with decodes and drafts. Steps with drafts have no prompts."""
        if self._decode_only:
            _, decode_s = _nearest(sorted(self._decode_only.values()), num_decodes)
            self._draft_samples.append(max(0.0, seconds - decode_s) / num_drafted)

    def _add_draft_work(self, work: DraftWork) -> None:
        if work.num_passes:
            passes = self._passes.setdefault(work.num_served.bit_length(), deque(maxlen=_NUM_KEPT))
            passes.append((work.num_served, work.proposal_s / work.num_passes))
        if work.num_catch_up_tokens >= _LEAST_CAUGHT_UP:
            self._caught_up_samples.append(work.catch_up_s / work.num_catch_up_tokens)

    def _add_prompts(self, flop_s: float) -> None:
        self._flop_samples.append(flop_s)
        self._flop_s = max(_median(self._flop_samples), _MOST_DROP * self._flop_s)

    def forget(self) -> None:
        """Removes all plans in flight; the measurements stay."""
        self._plans.clear()


def _nearest(entries: Sequence[tuple[int, float]], num: int) -> tuple[int, float]:
    """Returns the last entry whose number is at most `num`, or the first entry if there is no such entry."""
    below = [entry for entry in entries if entry[0] <= num]
    return below[-1] if below else entries[0]


def _medians(steps: Collection[tuple[int, float]]) -> tuple[int, float]:
    """Returns the medians of the numbers and of the seconds."""
    return _median([num for num, _ in steps]), _median([seconds for _, seconds in steps])


def _median(values: Collection[_Number]) -> _Number:
    """Returns the middle one of the sorted values; of two middle values, the larger one."""
    return sorted(values)[len(values) // 2]
