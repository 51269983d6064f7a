"""The load that an engine reports: its work in tokens, and its measured rates."""

from types import SimpleNamespace

import pytest

from rayloom_engine.core import cached_tokens
from rayloom_engine.core.measured_load import measured_load
from rayloom_engine.core.stats import Counters
from rayloom_engine.core.step_seconds import StepSeconds
from rt_scheduler import SimulatedRank, make_scheduler, make_sequence

COSTS = StepSeconds(decode_only=((1, 0.010), (8, 0.020)), token_s=0.001, pair_s=0.000_01)


def made(*, num_running=0, held=0, queued=0):
    """A scheduler with 8 slots and 100 blocks of 16 tokens. Running sequences hold `held` of these blocks."""
    config = SimpleNamespace(block_size=16, max_num_seqs=8, max_num_batched_tokens=100)
    pool = SimpleNamespace(num_blocks=100, num_free=100 - held)
    return SimpleNamespace(config=config, pool=pool, num_running=num_running, num_queued_tokens=queued)


def test_nothing_runs_and_the_whole_cache_is_free():
    found = measured_load(made(queued=7), None)
    assert (found.queued_tokens, found.running_tokens, found.max_running_tokens) == (7, 0, 1600)
    assert (found.prefill_tokens_per_s, found.decode_tokens_per_s) == (0.0, 0.0)


def test_short_sequences_are_limited_by_the_slots_and_long_ones_by_the_cache():
    short = measured_load(made(num_running=2, held=4), None)
    assert (short.running_tokens, short.max_running_tokens) == (64, 256)  # a quarter of 8 slots
    long = measured_load(made(num_running=2, held=50), None)
    assert (long.running_tokens, long.max_running_tokens) == (800, 1600)  # half of the cache


def test_rates_follow_from_the_measured_costs():
    found = measured_load(made(), COSTS)
    # In a prompt of 100 tokens, a token takes 1 ms, plus 0.01 ms for each of 100 positions.
    assert found.prefill_tokens_per_s == pytest.approx(500)
    assert found.decode_tokens_per_s == pytest.approx(400)  # 8 tokens in 20 ms


def test_the_mean_output_follows_the_last_ones():
    counters = Counters()
    for number in (10, 20, 30):
        counters.note_output(number)
    assert counters.mean_output_tokens == pytest.approx(20)
    for _ in range(500):
        counters.note_output(100)
    assert counters.mean_output_tokens == pytest.approx(100, rel=1e-3)


def test_tokens_of_prompts_count_until_they_are_computed():
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", range(1, 13), max_tokens=2))
    scheduler.add(make_sequence("b", (1, 2, 3), max_tokens=2))
    assert scheduler.num_queued_tokens == 15
    found = []
    while (plan := scheduler.schedule()) is not None:
        scheduler.update(rank.run(plan))
        found.append(scheduler.num_queued_tokens)
    # A step has 8 tokens, so 7 tokens are left after the first step, and 0 after the second. Decodes do not count.
    assert found == [7, 0, 0]
    assert scheduler.counters.mean_output_tokens == 2


def test_a_probe_is_no_output():
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("probe/1", (0,), max_tokens=1), is_resume=True)
    scheduler.update(rank.run(scheduler.schedule()))
    assert scheduler.counters.num_outputs == 0


def test_a_load_hashes_a_bounded_number_of_blocks_and_the_next_ones_the_rest(monkeypatch):
    monkeypatch.setattr(cached_tokens, "MAX_HASHED_BLOCKS", 5)
    scheduler = make_scheduler(num_blocks=20, enable_prefix_caching=True)
    prompt = tuple(range(13))  # 3 full blocks of 4 tokens, and the token that is always computed
    scheduler.add(make_sequence("first", prompt, max_tokens=1))
    rank = SimulatedRank()
    while scheduler.has_unfinished:
        scheduler.update(rank.run(scheduler.schedule()))
    waiting = [make_sequence(f"{number}", prompt) for number in range(4)]
    for sequence in waiting:
        scheduler.add(sequence)
    tokens = [scheduler.load().tenants[0].prefill_tokens for _ in range(4)]
    # The calls find more and more of the 52 tokens in the cache: first 20 tokens (5 blocks), then 40 (10 blocks), and
    # at last 48 (12 blocks).
    assert tokens == [32, 12, 4, 4]
    assert [len(sequence.known_hashes) for sequence in waiting] == [3, 3, 3, 3]
