"""KV sizing, with blocks of 1 MiB, so that numbers of blocks are MiB."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from rayloom_engine.errors import ConfigError
from rayloom_engine.kv.memory import GIB, KvDemand, RankMemory, SequenceBlocks, plan_kv_memory, share_of_gpu

MIB = 1 << 20


_DEMAND = KvDemand(block_bytes=MIB, sequence=SequenceBlocks(block_size=16), max_num_seqs=1000, model_max_len=8192)
_MEMORY = RankMemory(free_bytes=2 * GIB, is_cpu=True)


def _plan(**changes):
    memory = {field.name: changes.pop(field.name) for field in fields(RankMemory) if field.name in changes}
    return plan_kv_memory(replace(_DEMAND, **changes), replace(_MEMORY, **memory))


def test_half_of_free_memory_on_cpu() -> None:
    plan = _plan()
    assert (plan.num_blocks, plan.max_model_len) == (1024, 8192)
    assert "1024 blocks x 16 tokens = 16384 tokens, 1.00 GiB (50% of 2.00 GiB free)" in plan.explanation


def test_the_ranks_of_a_cpu_take_four_gib_together_at_most() -> None:
    assert _plan(free_bytes=64 * GIB).num_blocks == 4096
    plan = _plan(free_bytes=16 * GIB, ranks_on_host=4)
    assert plan.num_blocks == 1024
    assert "1.00 GiB (1 GiB cap on CPU, 16.00 GiB free)" in plan.explanation


def test_a_cpu_keeps_half_or_the_memory_of_a_step() -> None:
    assert _plan(step_bytes=1024 * MIB).num_blocks == 1024
    plan = _plan(step_bytes=1500 * MIB)
    assert plan.num_blocks == 548
    assert "2.00 GiB free, less 1.46 GiB for a step" in plan.explanation


def test_a_sequence_of_the_wanted_length_precedes_the_buffers_that_only_some_steps_have() -> None:
    """A 7B model with 32 threads: attention over a long context adds 63 MiB to the 166 MiB of a usual step."""
    memory = {"free_bytes": 452 * MIB, "step_bytes": 166 * MIB, "most_step_bytes": 229 * MIB}
    assert _plan(**memory, max_model_len=200 * 16).num_blocks == 223
    plan = _plan(**memory, max_model_len=224 * 16)
    assert (plan.num_blocks, plan.max_model_len) == (224, 3584)
    assert _plan(**memory, max_model_len=224 * 16, adapters_bytes=62 * MIB).num_blocks == 224
    with pytest.raises(
        ConfigError, match=r"room for 3568 tokens \(0.44 GiB free, less 0.16 GiB for a step and 0.06 GiB"
    ):
        _plan(**memory, max_model_len=224 * 16, adapters_bytes=63 * MIB)
    with pytest.raises(ConfigError, match=r"room for 3616 tokens \(50% of 0.44 GiB free\)"):
        _plan(**memory, max_model_len=227 * 16)
    cut = _plan(**memory)
    assert (cut.num_blocks, cut.max_model_len) == (226, 3616)  # half of the memory, as without the buffers


def test_a_cpu_keeps_the_memory_of_a_step_and_of_adapters() -> None:
    assert _plan(step_bytes=24 * MIB, adapters_bytes=1000 * MIB).num_blocks == 1024
    plan = _plan(step_bytes=24 * MIB, adapters_bytes=1001 * MIB)
    assert plan.num_blocks == 1023
    assert "2.00 GiB free, less 0.02 GiB for a step and 0.98 GiB for LoRA adapters" in plan.explanation


def test_a_gpu_keeps_a_tenth_or_the_memory_of_a_step() -> None:
    free = 10 * 1024 * MIB
    assert _plan(is_cpu=False, free_bytes=free, max_num_seqs=9999, step_bytes=1000 * MIB).num_blocks == 9216
    plan = _plan(is_cpu=False, free_bytes=free, max_num_seqs=9999, step_bytes=2048 * MIB)
    assert plan.num_blocks == 8192
    assert "10.00 GiB free, less 2.00 GiB for a step" in plan.explanation


def test_nothing_is_taken_that_no_sequence_could_use() -> None:
    assert _plan(max_num_seqs=1).num_blocks == 512


def test_most_of_a_gpu() -> None:
    assert _plan(is_cpu=False, free_bytes=10 * GIB, max_num_seqs=10**6).num_blocks == 9216


def test_bytes_and_blocks_can_be_set() -> None:
    assert _plan(kv_cache_memory_bytes=600 * MIB).num_blocks == 600
    assert _plan(kv_cache_memory_bytes=600 * MIB, num_kv_blocks=7).num_blocks == 7


def test_the_context_is_cut_to_fit_unless_it_was_given() -> None:
    plan = _plan(num_kv_blocks=10)
    assert plan.max_model_len == 160
    assert "cut from 8192" in plan.explanation
    with pytest.raises(ConfigError, match=r"one sequence of 161 tokens needs 0.01 GiB .* room for 160 tokens"):
        _plan(num_kv_blocks=10, max_model_len=161)


def test_more_than_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="9000 is more than the model's 8192"):
        _plan(max_model_len=9000)


def test_no_memory_at_all_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes"):
        _plan(free_bytes=0)


def test_a_window_needs_room_for_itself_and_a_step_alone() -> None:
    # A step needs the 31 positions before its first token and its own 64 positions. These 95 positions are in at most 7
    # blocks.
    sequence = SequenceBlocks(block_size=16, window=32, num_step_tokens=64)
    assert [sequence.most(length) for length in (1, 96, 97, 8192)] == [1, 6, 7, 7]
    plan = _plan(sequence=sequence, max_num_seqs=3)
    assert (plan.num_blocks, plan.max_model_len) == (21, 8192)
    assert _plan(sequence=sequence, num_kv_blocks=7, max_model_len=8192).max_model_len == 8192
    with pytest.raises(ConfigError, match="room for 96 tokens"):
        _plan(sequence=sequence, num_kv_blocks=6, max_model_len=8192)


def test_a_cpu_keeps_few_cached_blocks_at_first_but_a_whole_conversation() -> None:
    assert _plan().num_kept_blocks == 512  # for the longest sequence, more than the 256 blocks of 256 MiB
    assert _plan(max_model_len=1024).num_kept_blocks == 256
    assert _plan(max_model_len=1024, ranks_on_host=4).num_kept_blocks == 64  # again for the longest sequence
    assert _plan(is_cpu=False).num_kept_blocks is None


@pytest.mark.parametrize(
    ("free", "own", "num_sharing", "share"),
    [
        (70, 10, 1, 70),
        (60, 10, 2, 30),  # the other rank has loaded 10 as well
        (70, 10, 2, 30),  # the other rank has loaded nothing yet
        (40, 10, 2, 20),  # another program uses 20
        (30, 50, 2, 0),  # this rank's weights exceed its half
    ],
)
def test_ranks_on_a_gpu_of_80_divide_its_memory(free: int, own: int, num_sharing: int, share: int) -> None:
    assert share_of_gpu(free, 80, own, num_sharing) == share
