"""What others learn of the copies in host memory: the next core from the saved index, routers from the log."""

from __future__ import annotations

from collections import Counter

from rayloom_engine.core.cache_log import CacheLog
from rayloom_engine.core.host_tier import HostTier
from rt_host_copies import OTHERS, PROMPT, compute
from rt_scheduler import SimulatedRank, make_scheduler, make_sequence


class SavedInMemory:
    """Implements SavedIndex, in this process."""

    def __init__(self) -> None:
        self.table: dict[int, bytes] = {}

    def keep(self, slot: int, content: bytes) -> None:
        self.table[slot] = content

    def drop(self, slot: int) -> None:
        del self.table[slot]

    def entries(self) -> list[tuple[int, bytes]]:
        return sorted(self.table.items())


def test_the_next_core_process_loads_what_the_saved_index_has() -> None:
    saved_index, rank = SavedInMemory(), SimulatedRank()
    scheduler = make_scheduler(12, num_host_slots=64)
    scheduler.pool.tier.begin_epoch(("a",), saved_index)
    compute(scheduler, rank, "first", PROMPT, max_tokens=9)
    rank.forget_all()
    successor = make_scheduler(12, num_host_slots=64)
    successor.pool.tier.begin_epoch(("a",), saved_index)
    successor.check_integrity()
    assert compute(successor, rank, "first", PROMPT, max_tokens=9) == 8
    assert rank.num_loaded_blocks == 2


def test_the_saved_index_forgets_entries_that_the_next_core_process_does_not_use() -> None:
    saved_index = SavedInMemory()
    saved_index.table = {0: b"a", 1: b"a", 2: b"b"}
    tier = HostTier(4, 4)
    tier.begin_epoch(("m",), saved_index)
    assert saved_index.table == {0: b"a", 2: b"b"}
    tier.check_integrity(Counter())


def test_the_saved_index_has_no_slot_that_a_plan_in_flight_writes() -> None:
    saved_index, rank = SavedInMemory(), SimulatedRank()
    scheduler = make_scheduler(9, num_host_slots=3)
    scheduler.pool.tier.begin_epoch(("a",), saved_index)
    num_stores = 0
    for number, prompt in enumerate([PROMPT, *OTHERS, PROMPT]):
        scheduler.add(make_sequence(str(number), prompt, max_tokens=6))
        while (plan := scheduler.schedule()) is not None:
            num_stores += len(plan.host_stores)
            assert not {slot for _, slot in plan.host_stores} & saved_index.table.keys()
            scheduler.update(rank.run(plan))
    assert num_stores > 6, "slots were used again"


def test_routers_keep_a_block_that_was_evicted_but_has_a_copy() -> None:
    scheduler, rank = make_scheduler(9, num_host_slots=64), SimulatedRank()
    scheduler.pool.log = log = CacheLog()
    known: set[bytes] = set()
    for number, prompt in enumerate([PROMPT, *OTHERS, PROMPT]):
        compute(scheduler, rank, str(number), prompt)
        added, removed = log.take()
        assert not set(added) & known
        assert set(removed) <= known
        known = (known | set(added)) - set(removed)
        assert known == set(scheduler.pool.cached_hashes())
    first = make_sequence("x", PROMPT)
    assert set(first.hashes(3, 4)) <= known
