"""The prefix index of a gateway equals the core's, in random histories of the real scheduler.

In the histories ranks and messages are lost, and fronts join late.
"""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.block_hash import prompt_hashes
from rayloom_engine.core.block_pool import BlockPool
from rayloom_engine.core.cache_log import CacheLog
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.load import SchedulerLoad, TenantLoad
from rayloom_engine.core_server import cache_publisher
from rayloom_engine.core_server.cache_publisher import CachePublisher
from rayloom_engine.protocol.framing import core_decoder, frame
from rayloom_engine.protocol.messages import CacheChanges, LoadReport
from rayloom_engine.routing.prefix_index import PrefixIndex, cut_hashes
from rt_scheduler import BLOCK_SIZE, SimulatedRank, make_scheduler, make_sequence

HASHES = [bytes([number]) * 16 for number in range(1, 9)]
START = 77


class Fronts:
    """Collects the messages to each connection, decoded as at the other end."""

    def __init__(self) -> None:
        self.mail: dict[int, list[object]] = {}

    def send(self, connection: int, message) -> None:
        self.mail.setdefault(connection, []).append(core_decoder.decode(frame(message)[4:]))

    def take(self, connection: int) -> list[object]:
        return self.mail.pop(connection, [])


def changes(number: int, added: str = "", removed: str = "", **other: int) -> CacheChanges:
    """`added` and `removed`: indices of HASHES, as digits."""
    return CacheChanges(
        **{"start": START, "block_size": 16, **other},
        number=number,
        added=b"".join(HASHES[int(digit)][:8] for digit in added),
        removed=b"".join(HASHES[int(digit)][:8] for digit in removed),
    )


def test_overlap_ends_at_the_first_missing_block() -> None:
    index = PrefixIndex()
    blocks = cut_hashes(HASHES)
    assert index.num_leading(blocks) == 0
    assert index.apply(changes(4, "01", part=0, num_parts=2))
    assert not index.is_complete
    assert index.apply(changes(4, "3", part=1, num_parts=2))
    assert index.is_complete
    assert index.num_leading(blocks) == 2
    assert index.apply(changes(5, "2", "0"))
    assert index.num_leading(blocks) == 0
    assert index.num_leading(blocks[1:]) == 3
    assert index.num_leading(blocks, also={blocks[0]}) == 4


def test_missing_changes_empty_the_index_until_the_whole_arrives() -> None:
    index = PrefixIndex()
    assert not index.apply(changes(1, "0")), "changes before the whole"
    assert index.apply(changes(0, "", num_parts=1))
    assert index.apply(changes(1, "0"))
    assert not index.apply(changes(3, "1"))
    assert len(index) == 0
    assert not index.apply(changes(4, "2")), "still incomplete"
    assert index.apply(changes(4, "012", num_parts=1))
    assert index.apply(changes(5, "3"))
    assert index.num_leading(cut_hashes(HASHES)) == 4


def test_changes_of_another_start_of_the_core_are_a_gap() -> None:
    index = PrefixIndex()
    assert index.apply(changes(0, "0", num_parts=1))
    assert not index.apply(changes(1, "1", start=START + 1))
    assert index.apply(changes(1, "1", start=START + 1, num_parts=1))
    assert index.num_leading(cut_hashes(HASHES)[1:]) == 1


def test_a_part_out_of_order_is_a_gap() -> None:
    index = PrefixIndex()
    assert index.apply(changes(2, "0", part=0, num_parts=3))
    assert not index.apply(changes(2, "2", part=2, num_parts=3))
    assert len(index) == 0


def test_memory_is_bounded() -> None:
    index = PrefixIndex(max_blocks=3)
    assert index.apply(changes(0, "01", num_parts=1))
    assert index.apply(changes(1, "2345"))
    assert len(index) == 3
    assert index.apply(changes(2, "6", removed="0123"))
    assert index.num_leading(cut_hashes(HASHES[6:])) == 1


def test_a_log_has_only_net_changes() -> None:
    log = CacheLog()
    log.added(b"stays")
    log.added(b"comes and goes")
    log.removed(b"comes and goes")
    log.removed(b"goes and comes")
    log.added(b"goes and comes")
    log.removed(b"goes")
    assert log.take() == ([b"stays"], [b"goes"])
    assert log.take() == ([], [])


def test_a_gateway_hashes_prompts_as_the_scheduler_does() -> None:
    prompt = tuple(range(19))
    for salt in (b"", b"salt"):
        sequence = make_sequence(prompt=prompt, cache_key=salt)
        assert prompt_hashes(prompt, 4, salt) == sequence.hashes(4, 4)
    assert not set(prompt_hashes(prompt, 4, b"")) & set(prompt_hashes(prompt, 4, b"salt"))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 1), min_size=1, max_size=20).map(tuple)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("lose ranks"), st.none()),
        st.tuples(st.just("publish"), st.none()),
        st.tuples(st.just("lose a message"), st.none()),
        st.tuples(st.just("join"), st.integers(0, 2)),
        st.tuples(st.just("leave"), st.integers(0, 2)),
    ),
    max_size=40,
)


class World:
    """A core's scheduler with a small pool, its publisher, and the indexes of up to three gateways."""

    def __init__(self) -> None:
        self.rank = SimulatedRank()
        self.engine = Engine(make_scheduler(), LocalExecutor(self.rank), clock=time.monotonic)
        self.fronts = Fronts()
        self.publisher = CachePublisher(self.engine, self.fronts, START)  # type: ignore[arg-type]
        self.indexes: dict[int, PrefixIndex] = {}
        self.now_s = 0.0
        self.num_added = 0

    def do(self, operation: str, value) -> None:
        scheduler = self.engine.scheduler
        if operation == "add":
            self.num_added += 1
            self.engine.add(make_sequence(str(self.num_added), prompt=value))
        elif operation == "step":
            for _ in range(value):
                self.engine.step()
        elif operation == "abort":
            self.engine.abort(str(value))
        elif operation == "lose ranks":
            self.rank.forget_all()
            scheduler.forget_ranks()
        elif operation == "publish":
            self.publish()
        elif operation == "lose a message":
            self.publish(num_lost=1)
        elif operation == "join":
            self.indexes[value] = PrefixIndex()
            self.publisher.subscribe(value)
            self.receive()
        elif self.indexes.pop(value, None) is not None:
            self.publisher.unsubscribe(value)
            self.fronts.take(value)

    def publish(self, num_lost: int = 0) -> None:
        self.now_s += 1.0
        self.publisher.publish(self.now_s)
        for connection in self.indexes:
            del self.fronts.mail.get(connection, [])[:num_lost]
        self.receive()

    def receive(self) -> None:
        for connection, index in self.indexes.items():
            for message in self.fronts.take(connection):
                if isinstance(message, CacheChanges) and not index.apply(message):
                    self.publisher.subscribe(connection)
        if any(self.fronts.mail.get(connection) for connection in self.indexes):
            self.receive()

    def blocks(self) -> set[int]:
        return set(cut_hashes(self.engine.scheduler.pool.cached_hashes()))


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_the_index_equals_the_pool_after_any_history(operations: list[tuple[str, object]]) -> None:
    world = World()
    whole, cache_publisher.PART_BLOCKS = cache_publisher.PART_BLOCKS, 2
    try:
        for operation, value in operations:
            world.do(operation, value)
            world.engine.scheduler.check_integrity()
        # A gateway notices a lost message at the next changes. One more block ensures that there are changes.
        world.do("add", (9, len(operations), 9, 9, 9))
        world.do("step", 30)
        world.publish()
    finally:
        cache_publisher.PART_BLOCKS = whole

    for index in world.indexes.values():
        assert index.is_complete
        assert index._blocks == world.blocks()
    if not world.indexes:
        assert world.engine.scheduler.pool.log is None


def test_nothing_is_recorded_or_sent_unless_a_front_asks() -> None:
    world = World()
    world.do("add", (1, 2, 3, 4, 5))
    world.do("step", 4)
    world.publish()
    assert world.fronts.mail == {}
    assert world.engine.scheduler.pool.log is None


def test_load_is_sent_when_it_changes_and_at_most_every_fifth_of_a_second() -> None:
    world = World()
    world.publisher.subscribe(1)
    whole, load = world.fronts.take(1)
    assert (whole.number, whole.num_parts, whole.added) == (0, 1, b"")
    assert load == LoadReport(SchedulerLoad())

    world.do("add", (1,) * 20)
    world.publisher.publish(1.0)
    (load,) = world.fronts.take(1)
    assert load.load.tenants == (TenantLoad(tenant="", prefill_tokens=20),)

    world.do("step", 1)  # 8 of the 20 tokens
    world.publisher.publish(1.1)
    assert world.fronts.take(1) == []
    world.publisher.publish(1.21)
    changed, load = world.fronts.take(1)
    assert len(changed.added) == 2 * 8
    assert load.load.tenants == (TenantLoad(tenant="", prefill_tokens=12),)
    world.publisher.publish(2.0)
    assert world.fronts.take(1) == []


def test_a_waiting_prompt_counts_without_its_cached_prefix() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    engine = Engine(scheduler, LocalExecutor(SimulatedRank()), clock=time.monotonic)
    prompt = tuple(range(3 * BLOCK_SIZE))
    engine.add(make_sequence("first", prompt=prompt, max_tokens=3))
    for _ in range(3):
        engine.step()
    assert engine.load().num_decodes == 1
    engine.add(make_sequence("same", prompt=(*prompt, 1, 2)))
    engine.add(make_sequence("salted", prompt=(*prompt, 1, 2), cache_key=b"other"))

    load = engine.load()

    assert load.tenants == (TenantLoad(tenant="", prefill_tokens=2 + 14),)


def test_a_probe_does_not_count_as_load_while_it_waits_and_while_it_is_computed() -> None:
    engine = Engine(make_scheduler(), LocalExecutor(SimulatedRank()), clock=time.monotonic)
    engine.add_probe()
    assert engine.load() == SchedulerLoad()
    assert engine.scheduler.schedule() is not None
    assert engine.load() == SchedulerLoad()


@given(st.integers(0, 8))
def test_the_number_of_leading_blocks_is_found_by_halves(num: int) -> None:
    pool = BlockPool(8)
    for block_id, content in zip(pool.allocate(8)[:num], HASHES, strict=False):
        pool.register(block_id, content)
    assert pool.num_leading(HASHES) == num
