"""Sliding windows: blocks that no later token sees are released while a sequence runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.window import first_seen_block, longest_hit, most_blocks
from rayloom_engine.models.shape import read_shape
from rt_scheduler import SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence, run_to_end
from rt_stages import StagesInARow, load_stages, stage_config
from rt_tiny import tiny_variant


@pytest.mark.parametrize(
    ("position", "window", "first"),
    [(12, 6, 1), (13, 6, 2), (5, 6, 0), (8, 6, 0), (9, 6, 1), (0, 1, 0), (4, 1, 1), (100, None, 0)],
)
def test_the_first_block_that_a_token_sees(position: int, window: int | None, first: int) -> None:
    # Blocks have 4 tokens: the token at 12 sees 7..12, the token at 13 sees 8..13.
    assert first_seen_block(position, window, 4) == first


@given(start=st.integers(0, 200), num=st.integers(1, 40), window=st.integers(1, 50), block_size=st.integers(1, 20))
def test_no_step_needs_more_blocks_than_were_reckoned(start: int, num: int, window: int, block_size: int) -> None:
    touched = -(-(start + num) // block_size) - first_seen_block(start, window, block_size)
    assert touched <= most_blocks(start + num, window, num, block_size)


@pytest.mark.parametrize(
    ("known", "window", "hit"),
    [
        ([5, 6, None, 8, 9], 5, (4, 5)),  # the token at 20 sees 16..20: only block 4
        ([5, 6, None, 8, 9], 6, (3, 5)),  # 15..20
        ([5, 6, None, 8, 9], 10, (0, 2)),  # position 11 is in the unknown block, so only two blocks are a hit
        ([5, 6, None, 8, 9], None, (0, 2)),
        ([None, None, None], 1, (0, 0)),
        ([None, 6], 1, (2, 2)),  # the token at 8 sees only itself and needs no earlier block
    ],
)
def test_a_prefix_counts_as_known_when_the_blocks_of_its_next_token_are(known, window, hit) -> None:
    assert longest_hit(known, window, 4) == hit


def test_a_long_sequence_holds_its_window_and_no_more() -> None:
    # 40 tokens of prompt in steps of 8, then 12 more, are 13 blocks of 4. A pool of 6 blocks is enough.
    scheduler = make_scheduler(6, max_model_len=100, window=9)
    scheduler.add(make_sequence("a", [index % 50 for index in range(40)], max_tokens=12))
    outputs = run_to_end(scheduler, SimulatedRank(window=9))
    assert ids_of(outputs, "a") == expected_ids([index % 50 for index in range(40)], 12)
    assert scheduler.counters.num_preemptions == 0
    assert scheduler.pool.num_free == 6


def test_two_long_sequences_fit_where_their_windows_do() -> None:
    # The token at 20 sees positions 12..20, which are in blocks 3, 4 and 5. So each of the two sequences holds three of
    # its eight blocks.
    scheduler = make_scheduler(12, max_model_len=40, max_num_batched_tokens=4, window=9)
    for name in "ab":
        scheduler.add(make_sequence(name, range(20), max_tokens=12))
    rank = SimulatedRank(window=9)
    held = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(rank.run(plan))
        held.append(sum(len(sequence.held_block_ids) for sequence in scheduler.unfinished()))
        scheduler.check_integrity()
    assert scheduler.counters.num_preemptions == 0
    assert max(held) <= 2 * most_blocks(32, 9, 4, 4) == 8


def test_a_fork_that_comes_after_its_leaders_blocks_are_gone_computes_its_prompt() -> None:
    scheduler = make_scheduler(20, max_num_seqs=1, window=3)  # one sequence at a time
    scheduler.add(make_sequence("leader", range(12), max_tokens=9))
    scheduler.add(make_sequence("fork", range(12), max_tokens=9, fork_of="leader"))
    outputs = run_to_end(scheduler, SimulatedRank(window=3))
    assert ids_of(outputs, "fork") == ids_of(outputs, "leader") == expected_ids(range(12), 9)


def test_a_prefix_is_found_though_its_beginning_was_evicted() -> None:
    scheduler = make_scheduler(6, max_model_len=60, window=5)
    rank = SimulatedRank(window=5)
    prompt = [index % 50 for index in range(32)]
    scheduler.add(make_sequence("a", prompt, max_tokens=1))
    run_to_end(scheduler, rank)
    scheduler.add(make_sequence("b", prompt, max_tokens=1))
    outputs = run_to_end(scheduler, rank)
    # The prompt had 8 blocks in a pool of 6. The token at 28 sees 24..28, in block 6 and in its own block.
    assert outputs[0].num_cached_tokens == 28


@pytest.mark.parametrize(
    ("variant", "span"), [("mistral-window", 8), ("qwen2-some-windows", None), ("mistral", None), ("llama", None)]
)
def test_only_a_model_whose_layers_all_have_a_window_has_a_span(variant: str, span: int | None, tmp_path: Path) -> None:
    assert read_shape(tiny_variant(tmp_path, variant)).attention_span == span


def test_a_windowed_model_gives_the_same_tokens_with_few_blocks_as_with_all(tmp_path: Path) -> None:
    """The tiny model has a window of 8. So 6 blocks of 16 tokens are enough for two sequences of 90 tokens."""
    ranks = load_stages(stage_config(tiny_variant(tmp_path, "mistral-window")))
    prompts = {"a": [index * 7 % 256 for index in range(60)], "b": [index * 5 % 256 for index in range(60)]}
    said = []
    for window in (None, 8):
        scheduler = make_scheduler(
            6,
            block_size=16,
            max_num_batched_tokens=16,
            max_model_len=96,
            window=window,
            enable_prefix_caching=False,
        )
        scheduler.epoch = len(said) + 1
        rank = StagesInARow(ranks, epoch=scheduler.epoch)
        engine = Engine(scheduler, LocalExecutor(rank), clock=time.monotonic)
        for name, prompt in prompts.items():
            params = DecodingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            engine.add(make_sequence(name, prompt, params=params))
        ids: dict[str, list[int]] = {name: [] for name in prompts}
        while engine.has_unfinished:
            for output in engine.step():
                ids[output.sequence_id] += output.token_ids
            scheduler.check_integrity()
        assert window is None or scheduler.counters.num_preemptions == 0
        said.append(ids)
    assert said[0] == said[1]
    assert len(said[0]["a"]) == 30
