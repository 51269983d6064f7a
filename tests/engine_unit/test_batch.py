"""The tensors of a step, made from a rank's slots, and the matrix of their block tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, SlotStep, StepPlan
from rayloom_engine.worker.batch import InputBatch, build_batch
from rayloom_engine.worker.block_tables import BlockTables
from rayloom_engine.worker.slots import SlotTable

PARAMS = DecodingParams(max_tokens=1000)


def _new(slot: int, token_ids: tuple[int, ...], block_table: tuple[int, ...], **other) -> NewSlot:
    return NewSlot(
        slot=slot,
        request_id=f"r{slot}",
        token_ids=token_ids,
        num_prompt_tokens=other.pop("num_prompt_tokens", len(token_ids)),
        block_table=block_table,
        params=PARAMS,
        eos_token_ids=(),
        **other,
    )


def _batch(table: SlotTable, plan: StepPlan, block_size: int = 4) -> InputBatch:
    return build_batch(table.apply(plan), table.block_tables, block_size)


def test_a_decode_comes_before_a_chunk_and_has_the_newest_token() -> None:
    table = SlotTable(epoch=0)
    first = StepPlan(
        step_id=1,
        epoch=0,
        new_slots=(_new(3, (10, 11, 12, 13, 14), (7, 2)),),
        slots=(SlotStep(slot=3, start=0, num_tokens=5, samples=True),),
    )
    batch = _batch(table, first)
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4]
    assert batch.attention.slot_mapping_T.tolist() == [28, 29, 30, 31, 8]
    second = StepPlan(
        step_id=2,
        epoch=0,
        new_slots=(_new(0, (20, 21, 22, 23, 24, 25), (5,)),),
        slots=(
            SlotStep(slot=0, start=0, num_tokens=3),
            SlotStep(slot=3, start=5, num_tokens=1, new_token_ids=(99,), samples=True),
        ),
    )
    batch = _batch(table, second)
    assert [step.slot for step, _ in batch.steps] == [3, 0]
    assert batch.token_ids_T.tolist() == [99, 20, 21, 22]
    assert batch.positions_T.tolist() == [5, 0, 1, 2]
    assert batch.ends == [1, 4]
    assert (batch.attention.query_lens, batch.attention.context_lens) == ((1, 3), (6, 3))
    assert batch.attention.block_tables_SB.tolist() == [[7, 2], [5, 0]]
    assert batch.attention.slot_mapping_T.tolist() == [9, 20, 21, 22]
    assert {t.dtype for t in (batch.token_ids_T, batch.positions_T, batch.attention.block_tables_SB)} == {
        np.dtype(np.int64)
    }


def test_a_chunk_of_one_token_in_the_middle_of_a_prompt_has_that_token() -> None:
    table = SlotTable(epoch=0)
    plan = StepPlan(
        step_id=1,
        epoch=0,
        new_slots=(_new(0, (10, 11, 12), (1,)),),
        slots=(SlotStep(slot=0, start=1, num_tokens=1),),
    )
    assert _batch(table, plan).token_ids_T.tolist() == [11]


def test_blocks_behind_the_end_of_a_step_are_shown_as_padding() -> None:
    table = SlotTable(epoch=0)
    plan = StepPlan(
        step_id=1,
        epoch=0,
        new_slots=(_new(0, tuple(range(9)), (4, 5, 6)), _new(1, tuple(range(5)), (8, 9))),
        slots=(SlotStep(slot=0, start=0, num_tokens=3), SlotStep(slot=1, start=4, num_tokens=1, samples=True)),
    )
    assert _batch(table, plan).attention.block_tables_SB.tolist() == [[8, 9], [4, 0]]


def test_a_slot_that_is_used_again_keeps_nothing_of_the_longer_table_before() -> None:
    tables = BlockTables()
    tables.begin(9, tuple(range(1, 21)))
    tables.begin(9, (7,))
    assert tables.of(9).tolist() == [7]
    tables.append(9, (8, 9))
    assert tables.of(9).tolist() == [7, 8, 9]
    assert tables.rows(np.array([9, 0]), np.array([3, 5])).tolist() == [[7, 8, 9, 0, 0], [0] * 5]


def test_a_shared_prefix_is_copied_so_that_both_tables_grow_apart() -> None:
    tables = BlockTables()
    tables.begin(0, (3, 4, 5))
    tables.begin(20, (6,), shared_with=0, num_shared=2)
    tables.append(0, (7,))
    assert (tables.of(20).tolist(), tables.of(0).tolist()) == ([3, 4, 6], [3, 4, 5, 7])


def test_a_slot_cannot_share_more_blocks_than_the_other_one_has() -> None:
    table = SlotTable(epoch=0)
    fork = _new(1, (5,), (2,), num_prompt_tokens=2, prompt_of=0, num_shared_blocks=2)
    with pytest.raises(AssertionError, match="fewer blocks"):
        table.apply(StepPlan(step_id=1, epoch=0, new_slots=(_new(0, (1, 2), (1,)), fork)))


BLOCK_SIZE = 4
# Slots of one step: (known tokens, tokens computed before, tokens computed in this step, spare blocks). The test
# lowers numbers that are too large to be possible.
SLOTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 39), st.sampled_from((1, 1, 2, 5, 40)), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(histories=st.lists(SLOTS, min_size=1, max_size=3), seed=st.integers(0, 2**32 - 1))
def test_every_token_has_its_id_its_position_and_its_place_in_the_cache(histories, seed) -> None:
    """Each history reuses the slots of the history before it, in other orders and lengths."""
    generator = np.random.default_rng(seed)
    table = SlotTable(epoch=0)
    taken: tuple[int, ...] = ()
    for step_id, shapes in enumerate(histories):
        numbers = generator.permutation(30)[: len(shapes)].tolist()
        new_slots, steps, known = [], [], {}
        for number, (num_tokens, before, num, spare) in zip(numbers, shapes, strict=True):
            start = min(before, num_tokens - 1)
            num_computed = min(num, num_tokens - start)
            ids = tuple(generator.integers(0, 1000, num_tokens).tolist())
            blocks = tuple(generator.integers(1, 500, -(-num_tokens // BLOCK_SIZE) + spare).tolist())
            known[number] = ids, blocks
            num_new = 1 if num_computed == 1 and start + 1 == num_tokens and num_tokens > 1 else 0
            new_slots.append(_new(number, ids[: num_tokens - num_new], blocks[:1]))
            steps.append(
                SlotStep(
                    slot=number,
                    start=start,
                    num_tokens=num_computed,
                    new_token_ids=ids[num_tokens - num_new :],
                    new_block_ids=blocks[1:],
                    samples=start + num_computed == num_tokens,
                )
            )
        plan = StepPlan(step_id=step_id, epoch=0, freed_slots=taken, new_slots=tuple(new_slots), slots=tuple(steps))
        taken = tuple(numbers)
        batch = _batch(table, plan, BLOCK_SIZE)
        singles = [step for step in steps if step.num_tokens == 1]
        ordered = [*singles, *(step for step in steps if step.num_tokens > 1)]
        assert [step for step, _ in batch.steps] == ordered
        tokens = [(step, place) for step in ordered for place in range(step.start, step.start + step.num_tokens)]
        assert batch.positions_T.tolist() == [place for _, place in tokens]
        assert batch.token_ids_T.tolist() == [known[step.slot][0][place] for step, place in tokens]
        assert batch.attention.slot_mapping_T.tolist() == [
            known[step.slot][1][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for step, place in tokens
        ]
        assert batch.attention.query_lens == tuple(step.num_tokens for step in ordered)
        assert batch.attention.context_lens == tuple(step.start + step.num_tokens for step in ordered)
        used = [-(-length // BLOCK_SIZE) for length in batch.attention.context_lens]
        assert batch.attention.block_tables_SB.tolist() == [
            [*known[step.slot][1][:num], *([0] * (max(used) - num))] for step, num in zip(ordered, used, strict=True)
        ]
        assert batch.ends == [sum(batch.attention.query_lens[: index + 1]) for index in range(len(ordered))]
