"""The time for prompts in steps with decodes: the pure rule, plans of the scheduler, and a simulated engine."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.planning.prompt_time import LEAST_TOKENS, PromptTime
from rayloom_engine.core.step import SampledToken, StepPlan, StepResult
from rayloom_engine.core.step_seconds import StepSeconds
from rayloom_engine.core.step_work import StepWork
from rt_scheduler import SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence

# A decode takes 100 ms, and each prompt token 2.1 ms. In a step with one decode, prompts get 70 ms, enough for 33
# tokens.
COSTS = StepSeconds(decode_only=((1, 0.1), (4, 0.13)), token_s=0.0021, pair_s=0.0)


def test_prompts_get_the_tokens_that_fit_the_time() -> None:
    time = PromptTime(COSTS, 0.07)
    assert time.most(0) == time.most(5000) == 33
    time.spend(0, 20)
    assert time.most(0) == 13
    time.spend(0, 13)
    assert time.most(0) == 0


def test_a_few_tokens_are_always_computed() -> None:
    slow = StepSeconds(decode_only=((1, 0.1),), token_s=1.0, pair_s=0.0)
    time = PromptTime(slow, 0.07)
    assert time.most(0) == LEAST_TOKENS == 8
    time.spend(0, 5)
    assert time.most(0) == 3
    time.spend(0, 3)
    assert time.most(0) == 0


def test_tokens_with_a_long_context_cost_more() -> None:
    costs = StepSeconds(decode_only=((1, 1.0),), token_s=0.001, pair_s=0.00001)
    # n x (0.001 + 0.00001 x (start + n)) <= 0.7
    assert PromptTime(costs, 0.7).most(0) == 219
    assert PromptTime(costs, 0.7).most(1000) == 60
    assert PromptTime(costs, 0.7, window=100).most(1000) == 182


@settings(max_examples=300, deadline=None)
@given(
    token_s=st.floats(1e-6, 1.0),
    pair_s=st.floats(0.0, 1e-3),
    decode_s=st.floats(1e-6, 10.0),
    chunks=st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 512)), min_size=1, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 5000)),
)
def test_the_time_is_kept_and_used_up_to_a_token(token_s, pair_s, decode_s, chunks, window) -> None:
    time = PromptTime(StepSeconds(decode_only=((1, decode_s),), token_s=token_s, pair_s=pair_s), 0.7 * decode_s, window)

    def cost(start: int, num: int) -> float:
        return num * (token_s + pair_s * (min(start, window or start) + num))

    left_s = 0.7 * decode_s
    num_taken = 0
    for start, wanted in chunks:
        most = time.most(start)
        least = max(0, LEAST_TOKENS - num_taken)
        assert most >= least
        if most > least:
            assert cost(start, most) <= max(0.0, left_s) * (1 + 1e-6) + 1e-12
        assert cost(start, most + 1) > left_s * (1 - 1e-6) - 1e-12
        num = min(most, wanted)
        time.spend(start, num)
        left_s -= cost(start, num)
        num_taken += num


def _decoding(num: int, **sizes):
    """A scheduler and a rank with `num` sequences that decode."""
    sizes = {"max_num_seqs": 10, "max_num_batched_tokens": 50, "max_model_len": 700, **sizes}
    scheduler = make_scheduler(200, **sizes)
    rank = SimulatedRank()
    for index in range(num):
        scheduler.add(make_sequence(f"d{index}", prompt=(index, 1, 2), max_tokens=50))
    scheduler.update(rank.run(scheduler.schedule()))
    return scheduler, rank


def _chunks(plan: StepPlan) -> list[int]:
    return [step.num_tokens for step in plan.slots if step.num_tokens > 1]


def test_a_prompt_beside_decodes_is_cut_by_time_and_alone_by_tokens() -> None:
    scheduler, rank = _decoding(1)
    scheduler.add(make_sequence("p", prompt=range(100, 400)))
    plan = scheduler.schedule(COSTS)
    assert _chunks(plan) == [33]
    scheduler.update(rank.run(plan))
    scheduler.abort("d0")
    assert _chunks(scheduler.schedule(COSTS)) == [50]


def test_without_costs_only_the_token_budget_cuts_a_prompt() -> None:
    scheduler, _ = _decoding(1)
    scheduler.add(make_sequence("p", prompt=range(100, 190)))
    assert _chunks(scheduler.schedule()) == [49]


def test_the_time_is_shared_by_running_and_waiting_prompts() -> None:
    scheduler, rank = _decoding(4)
    # 4 decodes take 130 ms, so prompts get 91 ms: 43 tokens. In the last step of the prompt of 360 tokens, 27 tokens
    # are left for the other prompt.
    scheduler.add(make_sequence("p", prompt=range(100, 460)))
    scheduler.add(make_sequence("q", prompt=range(500, 590)))
    for _ in range(8):
        plan = scheduler.schedule(COSTS)
        assert _chunks(plan) == [43]
        scheduler.update(rank.run(plan))
    assert _chunks(scheduler.schedule(COSTS)) == [16, 27]


def test_a_crowd_of_prompts_gets_the_whole_budget() -> None:
    scheduler, _ = _decoding(4)
    for name in ("p", "q", "r", "s"):
        scheduler.add(make_sequence(name, prompt=(ord(name), *range(90))))
    assert sum(_chunks(scheduler.schedule(COSTS))) == 46


@pytest.mark.parametrize("reason", ["no slot", "no blocks", "a fork"])
def test_prompts_that_cannot_be_computed_now_are_no_crowd(reason: str) -> None:
    slots = {"max_num_seqs": 3} if reason == "no slot" else {}
    scheduler, _ = _decoding(2, **slots)
    scheduler.add(make_sequence("p", prompt=range(100, 400)))
    long_prompt = 600 if reason == "no blocks" else 300
    leader = "p" if reason == "a fork" else None
    prompt = range(100, 400) if leader else range(400, 400 + long_prompt)
    scheduler.add(make_sequence("q", prompt=prompt, max_tokens=1, fork_of=leader))
    # 2 decodes take 102.1 ms, so prompts get 71.47 ms: 34 tokens.
    assert sum(_chunks(scheduler.schedule(COSTS))) == 34


def test_tenants_share_the_time() -> None:
    scheduler, _ = _decoding(7, max_num_batched_tokens=100)
    scheduler.add(make_sequence("p", prompt=range(100, 190), tenant="a"))
    scheduler.add(make_sequence("q", prompt=range(200, 290), tenant="b"))
    # 7 decodes take 136.3 ms, and 140.5 ms together with one token of each prompt. So 2.2 x 140.5 - 136.3 = 172.8 ms
    # are left for the prompts, which is time for 82 tokens.
    chunks = _chunks(scheduler.schedule(COSTS))
    assert sum(chunks) == 82
    assert max(chunks) - min(chunks) <= 1


# --- A simulated engine: a 135M model on 2 CPU cores, in virtual time ---

_GEMM_MS = ((1, 2.6), (8, 3.2), (16, 5.0), (32, 8.0), (64, 14.5), (512, 110.0))  # (rows, ms)
_WORK = StepWork(flops_per_token=270e6, flops_per_pair=69_120.0, num_layers=30)


def _gemm_s(rows: int) -> float:
    for (low, low_ms), (high, high_ms) in pairwise(_GEMM_MS):
        if rows <= high:
            return (low_ms + (high_ms - low_ms) * (rows - low) / (high - low)) / 1000
    raise AssertionError("more rows than a step has")


class TimedRank(SimulatedRank):
    """A simulated rank whose steps take virtual time.

    The engine learns this time, which is not linear in the rows.
    """

    def __init__(self) -> None:
        super().__init__(block_size=16)
        self.now = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        pairs = sum(step.num_tokens * (step.start + step.num_tokens) for step in plan.slots if step.num_tokens > 1)
        seconds = _gemm_s(plan.num_tokens) + 0.0012 + 0.13e-6 * pairs
        self.now += seconds
        sampled = tuple(SampledToken(step.slot, 5) for step in plan.slots if step.samples)
        return StepResult(step_id=plan.step_id, epoch=plan.epoch, sampled=sampled, forward_s=seconds)


@pytest.mark.parametrize("num_streams", [1, 4, 8, 16])
def test_while_a_long_prompt_is_prefilled_the_other_streams_keep_half_their_speed(num_streams: int) -> None:
    rank = TimedRank()
    sizes = {"block_size": 16, "max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 4096}
    scheduler = make_scheduler(4000, enable_prefix_caching=False, **sizes)
    engine = Engine(scheduler, LocalExecutor(rank), clock=lambda: rank.now, work=_WORK)
    engine.add_probe()
    engine.step()
    for index in range(num_streams):
        engine.add(make_sequence(f"s{index}", prompt=range(128), max_tokens=3000))
    while any(sequence.num_generated == 0 for sequence in scheduler.unfinished()):
        engine.step()
    usual = []
    for _ in range(20):
        before = rank.now
        assert len(engine.step()) == num_streams
        usual.append(rank.now - before)
    engine.add(make_sequence("p", prompt=range(2048), max_tokens=1))
    between = []
    started = rank.now
    while True:
        before = rank.now
        outputs = engine.step()
        between.append(rank.now - before)
        assert len(outputs) >= num_streams, "every stream gets a token in every step"
        if ids_of(outputs, "p"):
            break
    assert sorted(between)[int(0.99 * len(between))] < 2 * max(usual)
    assert rank.now - started < 3.0, "without the others it takes 0.8 s"


def test_a_limited_prompt_ends_with_the_same_tokens() -> None:
    scheduler, rank = _decoding(3)
    prompt = tuple(range(7, 97))
    scheduler.add(make_sequence("p", prompt, max_tokens=6))
    outputs = []
    while scheduler.has_unfinished:
        outputs += scheduler.update(rank.run(scheduler.schedule(COSTS)))
        scheduler.check_integrity()
    assert ids_of(outputs, "p") == expected_ids(prompt, 6)


def test_once_the_time_is_used_up_no_waiting_prompt_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, rank = _decoding(7, max_num_batched_tokens=100)
    scheduler.add(make_sequence("p", prompt=range(100, 300)))
    scheduler.update(rank.run(scheduler.schedule(COSTS)))
    scheduler.add(make_sequence("q", prompt=range(300, 400)))
    lookups = []
    known = scheduler.pool.known
    monkeypatch.setattr(scheduler.pool, "known", lambda *args: lookups.append(args) or known(*args))
    assert len(_chunks(scheduler.schedule(COSTS))) == 1
    assert lookups == []
