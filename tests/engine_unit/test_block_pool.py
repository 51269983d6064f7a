"""Blocks: allocation order, prefix index, eviction order. The pools are small enough to check by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.block_pool import BlockPool
from rayloom_engine.core.window import longest_hit


def find(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Blocks of the longest known beginning of the chain."""
    known = pool.known(hashes)
    _, end = longest_hit(known, window=None, block_size=4)
    return [block_id for block_id in known[:end] if block_id is not None]


def test_blocks_without_content_are_given_out_before_cached_ones() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    assert table == [0, 1]
    pool.register(0, b"first")
    pool.release(table)
    assert pool.num_free == 4
    # Block 1 was freed without content, so it comes first. Blocks 2 and 3 were never used. Block 0 is cached, so it
    # comes last.
    assert pool.allocate(4) == [1, 2, 3, 0]
    assert find(pool, [b"first"]) == []


def test_the_tail_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block_id, content in zip(table, (b"a", b"ab", b"abc"), strict=True):
        pool.register(block_id, content)
    pool.release(table)
    assert pool.allocate(1) == [2]
    assert find(pool, [b"a", b"ab", b"abc"]) == [0, 1]


def test_a_hit_takes_a_cached_block_back_and_counts_its_holders() -> None:
    pool = BlockPool(3)
    table = pool.allocate(1)
    pool.register(table[0], b"a")
    pool.release(table)
    found = find(pool, [b"a"])
    assert pool.num_cached_only(found) == 1
    pool.hold(found)
    pool.hold(found)
    assert pool.ref_count(0) == 2
    assert pool.num_free == 2
    pool.release(found)
    assert pool.num_free == 2
    pool.release(found)
    assert pool.num_free == 3


def test_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first[0], b"a")
    pool.register(second[0], b"b")
    pool.release(first)
    pool.release(second)
    pool.hold(first)  # a hit makes the block the most recent
    pool.release(first)
    assert pool.allocate(1) == second


def test_equal_content_is_indexed_once() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.register(0, b"a")
    pool.register(1, b"a")
    assert find(pool, [b"a"]) == [0]
    pool.check_integrity([table])


def test_the_chain_stops_at_the_first_unknown_block() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    pool.register(0, b"a")
    pool.register(2, b"abc")
    assert find(pool, [b"a", b"ab", b"abc"]) == [0]
    pool.check_integrity([table])


def test_integrity_check_sees_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="counts say"):
        pool.check_integrity([])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 9)), max_size=60))
def test_no_operation_loses_or_doubles_a_block(operations: list[tuple[int, int, int]]) -> None:
    pool = BlockPool(8)
    tables: list[list[int]] = []
    for kind, num, pick in operations:
        if kind == 0 and num <= pool.num_free:
            tables.append(pool.allocate(num))
        elif kind == 1 and tables:
            pool.release(tables.pop(pick % len(tables)))
        elif kind == 2 and tables:
            table = tables[pick % len(tables)]
            pool.register(table[num % len(table)], bytes([pick]))
        elif kind == 3:
            found = find(pool, [bytes([pick])])
            if found:
                pool.hold(found)
                tables.append(found)
        pool.check_integrity(tables)


def test_a_block_whose_content_was_not_proven_is_cleared_for_its_next_owner() -> None:
    pool = BlockPool(3)
    pool.release(pool.allocate(3), num_proven=1)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.take_unclear() == (1, 2)
    assert pool.take_unclear() == (), "said once"


def test_a_later_owner_of_the_same_content_proves_it() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.register(table[0], b"a")
    pool.hold(find(pool, [b"a"]))
    pool.release(table, num_proven=0)
    assert pool.take_unclear() == (), "a hit keeps the content"
    pool.release(table, num_proven=1)
    assert pool.allocate(1) == [0]
    assert pool.take_unclear() == ()


def test_a_proven_block_stays_so_when_a_later_holder_ends_without_a_result() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.register(table[0], b"a")
    pool.release(table, num_proven=1)
    pool.hold(find(pool, [b"a"]))
    pool.release(table, num_proven=0)
    assert pool.known([b"a"]) == [0]


def test_a_free_block_that_is_not_proven_is_found_by_its_owner_alone_and_makes_way_for_another() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.register(table[0], b"a")
    pool.release(table, num_proven=0)
    assert pool.known([b"a"]) == [None]
    assert pool.known([b"a"], own={0}) == [0]
    pool.allocate(1)
    pool.register(1, b"a")
    assert pool.known([b"a"], own={0}) == [1]
    pool.check_integrity([[1]])
    assert pool.allocate(1) == [0]
    assert pool.take_unclear() == (0,)


def test_content_is_forgotten_whether_its_block_is_held_or_free_and_a_free_one_is_cleared() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.register(0, b"a")
    pool.register(1, b"b")
    pool.release([0])
    pool.forget([b"a", b"b", b"c"])
    assert pool.known([b"a", b"b"]) == [None, None]
    pool.check_integrity([table[1:]])
    assert pool.allocate(1) == [0]
    assert pool.take_unclear() == (0,)


def test_a_block_that_its_sequence_gave_back_is_found_once_finite_logits_followed_and_cleared_all_the_same() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.register(0, b"a")
    pool.release(table, num_proven=0)
    pool.vouch(table, [b"other"])
    assert pool.known([b"a"]) == [None]
    pool.vouch(table, [b"a"])
    assert pool.known([b"a"]) == [0]
    assert pool.allocate(1) == [0]
    assert pool.take_unclear() == (0,)
