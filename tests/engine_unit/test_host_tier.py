"""Copies of KV blocks in host memory: which blocks a scheduler stores and loads, and which copies it keeps.

test_scheduler_properties.py has random histories of a whole scheduler, test_host_slots.py the index of copies. The
files of the memory are in test_host_file.py, the copies themselves in test_kv_cache.py.
"""

from __future__ import annotations

from collections import Counter

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.host_slots import HostCopy
from rayloom_engine.core.host_tier import HostTier
from rayloom_engine.core.scheduler import Scheduler
from rt_host_copies import OTHERS, PROMPT, compute
from rt_scheduler import POISON, SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence, run_to_end


def evict(scheduler: Scheduler, rank: SimulatedRank) -> None:
    """Computes other prompts, until none of the blocks of PROMPT is in the pool any more."""
    for number, prompt in enumerate(OTHERS):
        compute(scheduler, rank, f"other {number}", prompt)


def test_an_evicted_prompt_is_loaded_again_and_counts_as_cached() -> None:
    scheduler, rank = make_scheduler(9, num_host_slots=64), SimulatedRank()
    assert compute(scheduler, rank, "first", PROMPT) == 0
    evict(scheduler, rank)
    num_before = rank.num_computed_tokens
    # The last token of a prompt is always computed, so its block is computed again.
    assert compute(scheduler, rank, "again", PROMPT) == 8
    assert rank.num_loaded_blocks == 2
    assert rank.num_computed_tokens - num_before == 4 + 1, "the prompt's last block, and one generated token"
    assert (scheduler.counters.prefix_hits, scheduler.counters.host_hits) == (8, 8)


def test_without_host_memory_an_evicted_prompt_is_computed_again() -> None:
    scheduler, rank = make_scheduler(9), SimulatedRank()
    compute(scheduler, rank, "first", PROMPT)
    evict(scheduler, rank)
    assert compute(scheduler, rank, "again", PROMPT) == 0
    assert rank.num_loaded_blocks == 0


def test_sequences_of_a_lost_rank_load_their_prompts_and_their_generated_tokens() -> None:
    scheduler, rank = make_scheduler(12, num_host_slots=64), SimulatedRank()
    scheduler.add(make_sequence("a", PROMPT, max_tokens=20))
    outputs = []
    for _ in range(15):
        outputs += scheduler.update(rank.run(scheduler.schedule()))
    lost = scheduler.schedule()
    scheduler.forget_ranks()
    rank.forget_all()
    rank.tear(lost)
    scheduler.check_integrity()
    num_before = rank.num_computed_tokens
    outputs += run_to_end(scheduler, rank)
    assert ids_of(outputs, "a") == expected_ids(PROMPT, 20)
    # Two steps for the prompt and 13 decodes have computed 25 tokens; 24 of them are 6 full blocks. The sixth became
    # full in the step before the last, which has stored it. 32 tokens are 31 computed ones and the last.
    assert rank.num_loaded_blocks == 6
    assert rank.num_computed_tokens - num_before == 31 - 24


def test_a_lost_rank_does_not_cost_the_computed_part_of_an_unfinished_prompt() -> None:
    scheduler, rank = make_scheduler(20, num_host_slots=64, max_num_batched_tokens=8), SimulatedRank()
    prompt = tuple(range(40))
    scheduler.add(make_sequence("a", prompt, max_tokens=1))
    for _ in range(3):  # 24 of 40 tokens; the third plan stores the blocks of the first two
        scheduler.update(rank.run(scheduler.schedule()))
    scheduler.forget_ranks()
    rank.forget_all()
    assert ids_of(run_to_end(scheduler, rank), "a") == expected_ids(prompt, 1)
    assert rank.num_loaded_blocks == 4
    assert rank.num_computed_tokens == 24 + 24


def test_what_an_aborted_sequence_has_not_proven_is_not_loaded() -> None:
    scheduler, rank = make_scheduler(20, num_host_slots=64), SimulatedRank()
    prompt = tuple(range(40))
    scheduler.add(make_sequence("a", prompt))
    for _ in range(3):
        scheduler.update(rank.run(scheduler.schedule()))
    scheduler.abort("a")
    scheduler.forget_ranks()
    rank.forget_all()
    assert compute(scheduler, rank, "b", prompt) == 0
    assert scheduler.pool.tier.slots.num_used > 0, "the copies of the second sequence"


def test_a_shared_prefix_has_copies_although_the_sequence_that_computed_it_was_aborted() -> None:
    scheduler, rank = make_scheduler(24, num_host_slots=64, max_num_batched_tokens=12), SimulatedRank()
    prompt = tuple(range(40))
    scheduler.add(make_sequence("x", prompt, max_tokens=3))
    for _ in range(3):
        scheduler.update(rank.run(scheduler.schedule()))
    scheduler.add(make_sequence("y", prompt, max_tokens=5))
    plan = scheduler.schedule()  # the last 4 tokens of both prompts
    assert scheduler.pool.tier.slots.num_used > 0 and scheduler.pool.tier.slots.shareable_contents() == []
    scheduler.abort("x")
    scheduler.update(rank.run(plan))
    run_to_end(scheduler, rank)
    assert rank.num_computed_tokens == 40 + 4 + 4, "y has shared what x had computed"
    scheduler.check_integrity()
    scheduler.forget_ranks()
    rank.forget_all()
    assert compute(scheduler, rank, "again", prompt) == 36


def test_logits_from_other_blocks_prove_nothing_about_the_copies_of_a_lost_rank() -> None:
    """`x` has stored half of its prompt when the rank fails. `y` computes the blocks again, and `x` shares them."""
    scheduler, rank = make_scheduler(24, num_host_slots=64, max_num_seqs=1), SimulatedRank()
    prompt = tuple(range(40))
    scheduler.add(make_sequence("x", prompt, max_tokens=3, priority=5))
    for _ in range(4):
        scheduler.update(rank.run(scheduler.schedule()))
    assert scheduler.pool.tier.slots.num_used == 6
    for slot, block in rank._host.items():  # the failing rank has stored NaN
        rank._host[slot] = {offset: (key, (*ids[:-1], POISON)) for offset, (key, ids) in block.items()}
    scheduler.forget_ranks()
    rank.forget_all()
    scheduler.add(make_sequence("y", prompt, max_tokens=3, priority=0))
    outputs = run_to_end(scheduler, rank)
    assert [ids_of(outputs, name) for name in "xy"] == [expected_ids(prompt, 3)] * 2
    assert rank.num_loaded_blocks == 0
    scheduler.forget_ranks()
    rank.forget_all()
    assert compute(scheduler, rank, "z", prompt) == 36, "the blocks that x got from y have new copies"


def test_logits_prove_nothing_about_blocks_before_the_window_that_others_have_computed() -> None:
    prompt, window = tuple(range(48)), 8
    scheduler = make_scheduler(40, num_host_slots=64, window=window)
    rank, slots = SimulatedRank(window=window), scheduler.pool.tier.slots
    scheduler.add(make_sequence("first", prompt, max_tokens=6))
    run_to_end(scheduler, rank)
    early = make_sequence("hashes", prompt).hashes(6, 4)
    scheduler.pool.forget(early)
    params = DecodingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    scheduler.add(make_sequence("unproven", prompt, params=params))
    for _ in range(4):
        scheduler.update(rank.run(scheduler.schedule()))
    scheduler.abort("unproven")
    assert not any(map(slots.is_shareable, early))
    num_before = rank.num_computed_tokens
    scheduler.add(make_sequence("again", prompt, max_tokens=6))
    run_to_end(scheduler, rank)
    assert rank.num_computed_tokens - num_before < 12, "the window at the end of the prompt was cached"
    assert not any(map(slots.is_shareable, early)), "no logits were computed from these blocks"


def test_a_sequence_with_a_window_holds_the_copies_in_its_window_alone() -> None:
    scheduler, rank = make_scheduler(40, num_host_slots=6, window=8), SimulatedRank(window=8)
    scheduler.add(make_sequence("a", tuple(range(64)), max_tokens=8))
    while (plan := scheduler.schedule()) is not None:
        scheduler.update(rank.run(plan))
        scheduler.check_integrity()
    hashes = make_sequence("hashes", tuple(range(64))).hashes(15, 4)
    assert any(map(scheduler.pool.tier.slots.is_shareable, hashes[12:])), "its first copies have given way to its last"


def test_copies_with_a_nan_are_forgotten() -> None:
    scheduler, rank = make_scheduler(9, num_host_slots=64), SimulatedRank()
    poisoned = (*PROMPT[:5], POISON, *PROMPT[6:])
    for name in ("first", "second"):
        scheduler.add(make_sequence(name, poisoned))
        (output,) = run_to_end(scheduler, rank)
        assert output.finish_reason == "corrupt"
        scheduler.check_integrity()
        assert scheduler.pool.tier.slots.shareable_contents() == []
    assert rank.num_loaded_blocks == 0


def test_a_prompt_longer_than_the_host_memory_keeps_its_beginning() -> None:
    scheduler, rank = make_scheduler(13, num_host_slots=4, max_num_batched_tokens=4), SimulatedRank()
    prompt = tuple(range(40))
    compute(scheduler, rank, "long", prompt)
    scheduler.forget_ranks()
    rank.forget_all()
    assert compute(scheduler, rank, "again", prompt) == 16


def test_the_end_of_a_prefix_gives_way_before_its_beginning() -> None:
    scheduler, rank = make_scheduler(9, num_host_slots=4), SimulatedRank()
    compute(scheduler, rank, "first", PROMPT, max_tokens=9)  # 5 full blocks, 4 of them fit
    compute(scheduler, rank, "other", OTHERS[0][:9], max_tokens=6)  # 3 full blocks
    scheduler.forget_ranks()
    rank.forget_all()
    assert compute(scheduler, rank, "again", PROMPT) == 4


def test_a_step_stores_few_blocks_besides_those_that_it_could_compute() -> None:
    scheduler, rank = make_scheduler(30, num_host_slots=64, max_num_batched_tokens=80), SimulatedRank()
    scheduler.add(make_sequence("a", tuple(range(80)), max_tokens=8))
    stores = []
    while (plan := scheduler.schedule()) is not None:
        stores.append(len(plan.host_stores))
        scheduler.update(rank.run(plan))
    assert stores == [0, 4, 4, 4, 4, 4, 1, 0], "20 blocks of the prompt, and one of generated tokens"


def test_a_block_that_is_evicted_before_it_was_stored_is_stored_by_the_plan_that_overwrites_it() -> None:
    scheduler, rank = make_scheduler(6, num_host_slots=64, max_model_len=24, max_num_batched_tokens=24), SimulatedRank()
    compute(scheduler, rank, "first", tuple(range(20)), max_tokens=1)  # its 5 blocks wait to be stored
    assert scheduler.pool.tier.num_stored == 0
    compute(scheduler, rank, "other", tuple(range(50, 70)), max_tokens=1)
    assert compute(scheduler, rank, "again", tuple(range(20)), max_tokens=1) == 16


def test_memory_with_another_id_has_no_copies() -> None:
    scheduler, rank = make_scheduler(12, num_host_slots=64), SimulatedRank()
    tier = scheduler.pool.tier
    tier.begin_epoch(("a", "b"))
    compute(scheduler, rank, "first", PROMPT, max_tokens=4)
    for memory, is_kept in ((("a", "b"), True), (("a", "c"), False)):
        scheduler.forget_ranks()
        rank.forget_all()
        tier.begin_epoch(memory)
        assert bool(tier.slots.num_used) is is_kept
    assert compute(scheduler, rank, "again", PROMPT) == 0


def test_without_memory_on_every_rank_nothing_is_stored_until_all_have_it() -> None:
    scheduler, rank = make_scheduler(12, num_host_slots=64), SimulatedRank()
    tier = scheduler.pool.tier
    tier.begin_epoch(("a", ""))
    compute(scheduler, rank, "first", PROMPT)
    assert tier.num_stored == 0
    scheduler.forget_ranks()
    rank.forget_all()
    tier.begin_epoch(("a", "b"))
    compute(scheduler, rank, "second", PROMPT)
    compute(scheduler, rank, "third", OTHERS[0])
    assert tier.num_stored > 0


def test_a_plan_without_copies_has_no_fields_for_them_on_the_wire() -> None:
    import msgspec

    scheduler = make_scheduler(9)
    scheduler.add(make_sequence("a", PROMPT))
    plan = scheduler.schedule()
    document = msgspec.json.decode(msgspec.json.encode(plan))
    assert not {"host_stores", "host_loads", "block_copies"} & document.keys()
    assert msgspec.json.decode(msgspec.json.encode(plan), type=type(plan)) == plan


def test_an_order_to_load_into_a_block_is_dropped_when_the_block_is_evicted() -> None:
    tier = HostTier(2, 4)
    copy = tier.slots.try_add(b"a", None)
    assert copy is not None
    tier.slots.stored(copy)
    tier.load(b"a", 7)
    tier.evicted(b"a", 7)
    tier.block_of = {b"a": 7}.get
    assert tier.take(1, 4).loads == ()
    tier.load(b"a", 8)
    tier.block_of = {b"a": 8}.get
    assert tier.take(2, 4).loads == ((copy.slot, 8),)
    tier.check_integrity(Counter())
    tier.confirm(2)
    tier.check_integrity(Counter())


def test_an_order_to_load_into_a_block_is_dropped_when_the_block_has_another_content() -> None:
    tier = HostTier(1, 4)
    copy = tier.slots.try_add(b"a", None)
    assert copy is not None
    tier.slots.stored(copy)
    tier.load(b"a", 7)
    assert tier.slots.try_add(b"b", None) is None, "the only slot will be read"
    tier.block_of = {b"a": 8}.get
    assert tier.take(1, 4).loads == ()
    tier.check_integrity(Counter())
    assert tier.slots.try_add(b"b", None) is not None


def test_finite_logits_prove_the_copy_of_a_shared_block_but_not_of_an_equal_one() -> None:
    for block_of_second, num_stores in ((7, 1), (8, 0)):
        tier = HostTier(4, 4)
        tier.block_of = {b"a": 7}.get
        tier.use(1, [(7, b"a")])
        tier.use(2, [(block_of_second, b"a")])
        tier.leave(1, [b"a"])
        tier.drop_unproven(1)
        tier.prove(2)
        assert len(tier.take(1, 4).stores) == num_stores


def test_shared_blocks_are_looked_at_again_only_after_another_sequence_has_proven_or_ended() -> None:
    tier = HostTier(64, 4)
    blocks = [(number, bytes([number])) for number in range(50)]
    tier.block_of = {content: block_id for block_id, content in blocks}.get
    tier.use(1, blocks)
    tier.use(2, blocks)
    tier.prove(2)
    looked_at, find = [], tier.slots.find

    def count(content: bytes) -> HostCopy | None:
        looked_at.append(content)
        return find(content)

    tier.slots.find = count  # type: ignore[method-assign]
    tier.prove(2)
    assert looked_at == []
    tier.drop_unproven(1)
    tier.prove(2)
    assert len(tier.take(1, 4000).stores) == 50


def test_a_block_is_not_stored_for_a_sequence_that_has_an_equal_block() -> None:
    tier = HostTier(1, 4)
    tier.block_of = {b"a": 7}.get
    tier.use(1, [(7, b"a")], first=1)  # the host memory has no room for its second block
    tier.use(2, [(8, b"a")])
    tier.prove(2)
    assert tier.take(1, 4).stores == ()
    tier.use(3, [(7, b"a")])
    assert tier.take(2, 4).stores == ((7, 0),)


def test_blocks_that_leave_the_prefix_index_as_wrong_lose_their_copies() -> None:
    scheduler, rank = make_scheduler(12, num_host_slots=64), SimulatedRank()
    compute(scheduler, rank, "first", PROMPT, max_tokens=4)
    hashes = make_sequence("again", PROMPT).hashes(3, 4)
    assert set(scheduler.pool.tier.slots.shareable_contents()) == set(hashes)
    scheduler.pool.forget(hashes[1:])
    assert scheduler.pool.tier.slots.shareable_contents() == hashes[:1]
    scheduler.check_integrity()
    assert compute(scheduler, rank, "again", PROMPT) == 4


def test_a_sequence_with_prompt_logprobs_computes_its_prompt() -> None:
    scheduler, rank = make_scheduler(9, num_host_slots=64), SimulatedRank()
    compute(scheduler, rank, "first", PROMPT)
    evict(scheduler, rank)
    params = DecodingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    scheduler.add(make_sequence("again", PROMPT, params=params))
    assert len(run_to_end(scheduler, rank)[-1].prompt_logprobs) == 11
    assert rank.num_loaded_blocks == 0
