"""The time for which prompts may delay running streams: the pure rules, plans, and the times that clients see."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.planning.backlog import Backlog, Prompt
from rayloom_engine.core.planning.prompt_time import PromptTime
from rayloom_engine.core.planning.step_builder import StepBuilder
from rayloom_engine.core.step import StepPlan
from rayloom_engine.core.step_seconds import StepSeconds
from rayloom_engine.core.step_work import StepWork
from rt_load import W1, W4, Load, LoadedEngine, Seen
from rt_scheduler import SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence

# A step of 1 decode takes 100 ms, of 4 decodes 130 ms, of 16 decodes 250 ms. Each token of a prompt adds 2 ms.
COSTS = StepSeconds(decode_only=((1, 0.1), (4, 0.13), (16, 0.25)), token_s=0.002, pair_s=0.0)


def _backlog(num_streams: int, *lengths: int) -> Backlog:
    return Backlog(num_streams, num_streams, tuple(Prompt(num, num) for num in lengths))


def test_beside_one_long_prompt_a_step_takes_at_most_seven_tenths_longer() -> None:
    assert _backlog(4, 2048).seconds(COSTS) == pytest.approx(0.7 * 0.13)


def test_beside_several_prompts_a_step_takes_at_most_2_2_times_the_step_of_all_of_them() -> None:
    # There are 10 streams and 6 prompts, so a step of all has 16 decodes. The step may take 2.2 x 250 ms. Of this time,
    # 10 decodes and a token of each prompt take 142 ms.
    assert _backlog(10, *[600] * 6).seconds(COSTS) == pytest.approx(2.2 * 0.25 - 0.142)


def test_a_short_prompt_gets_as_much_time_as_several_prompts() -> None:
    # 4 streams and 1 prompt: 2.2 x 132 - 130 = 160.4 ms. Four such steps compute 320 tokens.
    assert _backlog(4, 320).seconds(COSTS) == pytest.approx(0.1604)
    assert _backlog(4, 321).seconds(COSTS) == pytest.approx(0.091)


def test_the_rest_of_a_long_prompt_is_not_a_short_prompt() -> None:
    assert Backlog(4, 4, (Prompt(10, 2048),)).seconds(COSTS) == pytest.approx(0.091)


@pytest.mark.parametrize(
    ("num_streams", "num_prompts", "is_crowd"),
    [
        (0, 1, True),
        (1, 1, False),
        (1, 2, True),
        (2, 2, True),
        (3, 2, False),
        (3, 3, True),
        (16, 15, False),
        (16, 16, True),
    ],
)
def test_at_least_two_prompts_and_as_many_as_streams_are_a_crowd(num_streams, num_prompts, is_crowd) -> None:
    backlog = _backlog(num_streams, *[512] * num_prompts)
    assert backlog.is_crowd == is_crowd
    assert (backlog.seconds(COSTS) is None) == is_crowd


@pytest.mark.parametrize(
    ("lengths", "size"),
    [([2048], 1), ([2048, 5], 1), ([2048, 1023], 1), ([2048, 1024], 2), ([2048, *[128] * 12], 2), ([128] * 12, 12)],
)
def test_the_size_counts_prompts_of_the_longest_length(lengths: list[int], size: int) -> None:
    assert _backlog(4, *lengths).size == size


def test_a_tiny_prompt_beside_a_long_one_lifts_no_limit() -> None:
    assert _backlog(1, 2048, 5).seconds(COSTS) == _backlog(1, 2048).seconds(COSTS)


@pytest.mark.parametrize(
    ("num_streams", "lengths", "leaves"),
    [
        (0, [100] * 2, False),  # both end in this step
        (0, [300] * 3, True),  # one ends now and two in the next step
        (0, [300] * 2, False),  # only one stays for the next step
        (4, [128] * 12, True),  # 3 end now; 9 stay, beside 4 streams
        (9, [128] * 9, True),  # 3 end now; 6 stay
        (10, [128] * 9, False),  # 9 prompts are no crowd beside 10 streams
        (1, [2048] * 4, False),  # the next step ends none of them
    ],
)
def test_last_tokens_are_left_if_the_next_step_gets_a_whole_budget_too(num_streams, lengths, leaves) -> None:
    assert _backlog(num_streams, *lengths).leaves_last_tokens(500) == leaves


_PROMPTS = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), min_size=1, max_size=40).map(
    lambda pairs: tuple(Prompt(left, left + done) for left, done in pairs)
)


@settings(max_examples=300, deadline=None)
@given(
    prompts=_PROMPTS,
    num_streams=st.integers(0, 64),
    num_others=st.integers(0, 8),
    token_s=st.floats(1e-6, 1.0),
    decode_s=st.floats(1e-4, 1.0),
)
def test_every_limit_lies_between_that_of_a_long_prompt_and_that_of_several(
    prompts, num_streams, num_others, token_s, decode_s
) -> None:
    costs = StepSeconds(decode_only=((1, decode_s),), token_s=token_s, pair_s=0.0)
    num_decodes = max(1, num_streams + num_others)
    backlog = Backlog(num_streams, num_decodes, prompts)
    assert 1 <= backlog.size <= len(prompts)
    seconds = backlog.seconds(costs)
    least = 0.7 * costs.decode_s(num_decodes)
    most = 2.2 * costs.decode_s(num_decodes + len(prompts))
    if seconds is None:
        assert num_streams == 0 or (backlog.size >= 2 and backlog.size >= num_streams)
    else:
        assert least <= seconds <= most
    # A larger number of streams never gives prompts a larger part of a step.
    more = replace(backlog, num_streams=num_streams + 1)
    assert backlog.is_crowd or not more.is_crowd
    assert backlog.is_crowd or not backlog.leaves_last_tokens(512)


def _decoding(num: int, **sizes):
    """A scheduler and a rank with `num` sequences that decode."""
    scheduler = make_scheduler(200, **{"max_num_seqs": 20, "max_num_batched_tokens": 50, "max_model_len": 400, **sizes})
    rank = SimulatedRank()
    for index in range(num):
        scheduler.add(make_sequence(f"d{index}", prompt=(index, 1, 2), max_tokens=50))
    scheduler.update(rank.run(scheduler.schedule()))
    return scheduler, rank


def _chunks(plan: StepPlan) -> list[int]:
    return [step.num_tokens for step in plan.slots if step.num_tokens > 1]


def test_streams_of_a_crowd_begin_a_step_later_while_others_of_it_are_computed() -> None:
    scheduler, rank = _decoding(1, max_num_batched_tokens=51)
    for index in range(10):
        scheduler.add(make_sequence(f"p{index}", prompt=(20 + index, *range(19)), max_tokens=5))
    first = scheduler.schedule(COSTS)
    assert _chunks(first) == [19, 19, 12]  # all but the last token of two prompts, and a part of the third
    assert len(scheduler.update(rank.run(first))) == 1
    second = scheduler.schedule(COSTS)
    assert _chunks(second) == [8 - 1, 19, 19, 3]
    names = {output.sequence_id for output in scheduler.update(rank.run(second))}
    assert names == {"d0", "p0", "p1"}


def test_a_prompt_of_which_only_the_last_token_is_not_cached_is_computed_in_a_crowd() -> None:
    scheduler, rank = _decoding(1, max_num_batched_tokens=51)
    known = make_sequence("k", prompt=range(9), max_tokens=1)
    scheduler.add(known)
    scheduler.update(rank.run(scheduler.schedule()))
    for index in range(10):
        scheduler.add(make_sequence(f"p{index}", prompt=range(9) if index == 0 else (20 + index, *range(19))))
    plan = scheduler.schedule(COSTS)
    assert [step.num_tokens for step in plan.slots][:2] == [1, 1]
    assert "p0" in {output.sequence_id for output in scheduler.update(rank.run(plan))}


@pytest.mark.parametrize("num_tenants", [1, 2])
def test_a_crowd_ends_with_the_same_tokens(num_tenants: int) -> None:
    scheduler, rank = _decoding(1)
    prompts = {f"p{index}": tuple(range(index, index + 19)) for index in range(12)}
    for index, (name, prompt) in enumerate(prompts.items()):
        scheduler.add(make_sequence(name, prompt, max_tokens=6, tenant=f"{index % num_tenants}"))
    outputs = []
    while scheduler.has_unfinished:
        outputs += scheduler.update(rank.run(scheduler.schedule(COSTS)))
        scheduler.check_integrity()
    assert {name: ids_of(outputs, name) for name in prompts} == {
        name: expected_ids(prompt, 6) for name, prompt in prompts.items()
    }


def test_the_time_and_the_share_of_a_dropped_prompt_return_to_the_step() -> None:
    time = PromptTime(COSTS, 0.1)  # 50 tokens
    builder = StepBuilder(budget=100, max_decodes=4, share=60, prompt_time=time)
    dropped, kept = make_sequence("p", tenant="t"), make_sequence("q", tenant="t")
    builder.take(kept, 10, is_prompt=True)
    builder.take(dropped, 20, is_prompt=True)
    builder.take(dropped, 5, is_prompt=True)
    assert (time.most(0), builder.room_for("t"), builder.budget) == (15, 25, 65)
    builder.drop(dropped)
    assert (time.most(0), builder.room_for("t"), builder.budget) == (40, 50, 90)


# --- What clients of a load see, on a simulated engine ---


def _seen(load: Load, engine: LoadedEngine) -> Seen:
    engine.run(replace(load, num_requests=load.concurrency, num_output=16))  # to learn the costs
    return engine.run(load)


def _unlimited() -> LoadedEngine:
    return LoadedEngine(work=StepWork())


def test_in_w1_less_than_a_hundredth_of_the_tokens_come_late_and_the_throughput_hardly_falls() -> None:
    seen, unlimited = _seen(W1, LoadedEngine()), _seen(W1, _unlimited())
    usual_ms = unlimited.gap_ms(0.5)
    assert unlimited.gap_ms(0.99) > 10 * usual_ms
    assert seen.gap_ms(0.99) < 2.3 * usual_ms
    assert seen.tok_s > 0.96 * unlimited.tok_s
    assert seen.ttft_ms(0.5) < 1.2 * unlimited.ttft_ms(0.5)


def test_in_a_long_w1_no_token_comes_late_but_for_its_start_and_the_throughput_stays() -> None:
    load = replace(W1, num_requests=128)
    seen, unlimited = _seen(load, LoadedEngine()), _seen(load, _unlimited())
    late_ms = 2.4 * unlimited.gap_ms(0.5)
    assert sum(1e3 * gap_s > late_ms for gap_s in seen.gaps_s) < 30
    assert sum(1e3 * gap_s > late_ms for gap_s in unlimited.gaps_s) > 400
    assert seen.tok_s > 0.98 * unlimited.tok_s
    assert seen.ttft_ms(0.5) < 150


def test_in_w4_the_limits_cost_little() -> None:
    seen, unlimited = _seen(W4, LoadedEngine()), _seen(W4, _unlimited())
    assert seen.gap_ms(0.99) < unlimited.gap_ms(0.99) < 280
    assert seen.tok_s > 0.96 * unlimited.tok_s
    assert seen.ttft_ms(0.5) < 2000
