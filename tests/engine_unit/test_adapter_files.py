"""The files of hub adapters on the ranks' machines: the rank's thread, the core's joined report, and the front's wait.

A function of the test replaces the fetch. engine_real/test_hub_adapters.py has real downloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rayloom_engine.core.adapter import Adapter, AdapterReport, NeededAdapter, ServedAdapter
from rayloom_engine.core_server.ranks.adapter_reports import joined
from rayloom_engine.core_server.ranks.pool import RankPool
from rayloom_engine.errors import ModelError
from rayloom_engine.front.operations.rank_files import RankFiles
from rayloom_engine.front.operations.status_document import NO_CORE
from rayloom_engine.protocol.messages import CoreStatus
from rayloom_engine.protocol.ranks import Failed, Loaded
from rayloom_engine.worker import rank_server
from rayloom_engine.worker.adapter_files import AdapterFiles
from rayloom_engine.worker.rank_server import RankPlace, RankServer
from rt_fake_rank import TOKEN, Ranks
from rt_server import wait_until
from rt_stages import stage_config
from rt_tiny import tiny_variant

LONG_S = 60.0


def needed(name: str, number: int = 1) -> NeededAdapter:
    return NeededAdapter(adapter=Adapter(f"hf://acme/{name}@c", name.encode()), num_bytes=5, number=number)


class Fetches:
    """A fetch function whose calls wait for their outcomes. The test puts the outcomes into `outcomes`."""

    def __init__(self) -> None:
        self.begun: queue.Queue[str] = queue.Queue()
        self.outcomes: queue.Queue[Exception | None] = queue.Queue()

    def __call__(self, adapter: Adapter, num_bytes: int) -> None:
        assert num_bytes == 5
        self.begun.put(adapter.path)
        outcome = self.outcomes.get(timeout=LONG_S)
        if outcome is not None:
            raise outcome


def test_a_rank_reports_each_adapter_after_its_fetch() -> None:
    fetches = Fetches()
    files = AdapterFiles(fetch=fetches)
    assert files.wait(0.0), "nothing is needed"
    files.need((needed("a", 1), needed("b", 2)))
    assert fetches.begun.get(timeout=LONG_S) == "hf://acme/a@c"
    assert not files.wait(0.0)
    assert files.reports == ()
    fetches.outcomes.put(None)
    assert fetches.begun.get(timeout=LONG_S) == "hf://acme/b@c"
    assert files.reports == (AdapterReport(1),)
    fetches.outcomes.put(ModelError("gone"))
    assert files.wait(LONG_S)
    assert files.reports == (AdapterReport(1), AdapterReport(2, "gone"))
    files.need(())  # else the thread would fetch again during later tests


@pytest.mark.parametrize("error", [ModelError("gone"), OSError("no room"), ValueError("odd")])
def test_a_failed_fetch_is_repeated_while_the_adapter_is_needed(error: Exception) -> None:
    fetches = Fetches()
    files = AdapterFiles(retry_s=0.01, fetch=fetches)
    files.need((needed("a"),))
    fetches.outcomes.put(error)
    for _ in range(2):
        assert fetches.begun.get(timeout=LONG_S) == "hf://acme/a@c"
    fetches.outcomes.put(None)
    assert files.wait(LONG_S)
    assert files.reports == (AdapterReport(1),)


def test_a_repeated_load_gets_a_report_of_its_own_and_an_adapter_that_is_not_needed_gets_none() -> None:
    fetches = Fetches()
    files = AdapterFiles(fetch=fetches)
    files.need((needed("a", 1),))
    fetches.begun.get(timeout=LONG_S)
    files.need((needed("a", 2),))
    fetches.outcomes.put(ModelError("too late"))
    assert fetches.begun.get(timeout=LONG_S) == "hf://acme/a@c"
    assert files.reports == ()
    fetches.outcomes.put(None)
    assert files.wait(LONG_S)
    assert files.reports == (AdapterReport(2),)
    files.need(())
    assert files.reports == ()


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({}, ()),
        ({"rank 0 on a": [AdapterReport(1)]}, ()),
        ({"rank 0 on a": [AdapterReport(1)], "rank 1 on b": []}, ()),
        ({"rank 0 on a": [AdapterReport(1)], "rank 1 on b": [AdapterReport(1)]}, (AdapterReport(1),)),
        ({"rank 0 on a": [], "rank 1 on b": [AdapterReport(1, "gone")]}, (AdapterReport(1, "rank 1 on b: gone"),)),
        ({"rank 0 on a": [AdapterReport(3)], "rank 1 on b": [AdapterReport(3)]}, ()),
    ],
)
def test_an_adapter_is_there_once_every_rank_has_it_and_missing_once_a_rank_cannot_get_it(
    reports: dict[str, list[AdapterReport]], expected: tuple[AdapterReport, ...]
) -> None:
    assert joined([1], reports, 2) == expected


def test_a_rank_has_loaded_only_when_it_has_the_files_and_fetches_later_ones_while_it_serves(
    tmp_path: Path,
) -> None:
    ranks = Ranks()
    pool = ranks.pool
    pool.world_size = 1
    pool.needed_adapters = (needed("a", 1),)
    config = stage_config(tiny_variant(tmp_path, "qwen2-some-windows"), heartbeat_seconds=0.05)
    place = RankPlace(rank=0, incarnation=1, ranks_on_host=1, address=f"127.0.0.1:{ranks.port}", token=TOKEN)
    fetches = Fetches()
    files = AdapterFiles(fetch=fetches)
    rank = RankServer(config, place, adapter_files=files)
    thread = threading.Thread(target=rank.serve_core, daemon=True)
    thread.start()
    try:
        assert fetches.begun.get(timeout=LONG_S) == "hf://acme/a@c"
        wait_until(lambda: bool(pool.take_arrivals()), LONG_S, lambda: "the rank is attached")
        beat = pool.attached[0].control
        wait_until(lambda: beat.beat.phase == "kv_cache", LONG_S, lambda: "the weights are loaded")
        assert pool.poll(0.5) == [], "the rank waits for the files"
        assert pool.adapter_reports() == ()
        fetches.outcomes.put(None)
        replies: list[Any] = []
        wait_until(lambda: bool(replies.extend(pool.poll(1.0)) or replies), LONG_S, lambda: "the rank has loaded")
        assert [type(reply) for _, reply in replies] == [Loaded]
        wait_until(lambda: pool.adapter_reports() == (AdapterReport(1),), LONG_S, lambda: "the report")

        pool.needed_adapters = (needed("a", 1), needed("b", 2))
        assert fetches.begun.get(timeout=LONG_S) == "hf://acme/b@c"
        fetches.outcomes.put(ModelError("gone"))
        wait_until(lambda: len(pool.adapter_reports()) == 2, LONG_S, lambda: "the second report")
        node = pool.attached[0].greeting.node
        assert pool.adapter_reports()[1] == AdapterReport(2, f"rank 0 on {node}: gone")
    finally:
        ranks.close()
        thread.join(LONG_S)
        files.need(())  # else its thread would fetch again during later tests


@contextlib.contextmanager
def fetching_rank(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankPool, threading.Thread]]:
    """A pool with one rank, and the rank's main thread.

    The rank fetches a needed adapter, and this fetch does not end before the block ends.
    """
    monkeypatch.setattr(rank_server, "_ADAPTERS_SECONDS", 10 * LONG_S)
    ranks, is_over = Ranks(), threading.Event()
    ranks.pool.world_size = 1
    ranks.pool.needed_adapters = (needed("a"),)
    place = RankPlace(rank=0, incarnation=1, ranks_on_host=1, address=f"127.0.0.1:{ranks.port}", token=TOKEN)
    config = stage_config(model, heartbeat_seconds=0.05)
    files = AdapterFiles(fetch=lambda *_: (is_over.wait(), None)[1])
    rank = RankServer(config, place, adapter_files=files)
    thread = threading.Thread(target=rank.serve_core, daemon=True)
    thread.start()
    try:
        wait_until(lambda: bool(ranks.pool.take_arrivals()), LONG_S, lambda: "the rank is attached")
        yield ranks.pool, thread
    finally:
        is_over.set()
        ranks.close()
        thread.join(LONG_S)


def test_a_rank_that_waits_for_files_leaves_a_core_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fetching_rank(tiny_variant(tmp_path, "qwen2-some-windows"), monkeypatch) as (pool, thread):
        beats = pool.attached[0].control
        wait_until(lambda: beats.beat.phase == "kv_cache", LONG_S, lambda: "the weights are loaded")
        pool.attached[0].close()
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_rank_that_cannot_load_its_model_does_not_wait_for_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fetching_rank(tmp_path / "none", monkeypatch) as (pool, _):
        replies: list[Any] = []
        wait_until(lambda: bool(replies.extend(pool.poll(1.0)) or replies), LONG_S, lambda: "the rank has answered")
        assert [type(reply) for _, reply in replies] == [Failed]


def entry(name: str, num_bytes: int = 5) -> ServedAdapter:
    path = f"hf://acme/{name}@c" if num_bytes else f"/{name}"
    return ServedAdapter(name=name, adapter=Adapter(path, name.encode()), rank=8, created=0, num_bytes=num_bytes)


def status(*reports: AdapterReport, state: str = "serving") -> CoreStatus:
    return msgspec.structs.replace(NO_CORE, state=state, adapter_reports=reports)


class Core:
    """Receives the lists of needed adapters."""

    def __init__(self, most_s: float = LONG_S) -> None:
        self.lists: list[tuple[NeededAdapter, ...]] = []
        self.files = RankFiles(self.lists.append, most_s)

    def paths(self) -> list[list[str]]:
        return [[each.adapter.path for each in needed_list] for needed_list in self.lists]

    async def bring(self, adapter: ServedAdapter, *answers: Callable[[int], CoreStatus]) -> None:
        """Brings an adapter while the core answers with these statuses.

        Each of `answers` gets the number of the adapter.
        """
        work = asyncio.create_task(self.files.bring(adapter))
        for answer in answers:
            await asyncio.sleep(0)
            number = next(each.number for each in self.lists[-1] if each.adapter == adapter.adapter)
            assert not work.done()
            self.files.received(answer(number))
        await asyncio.wait_for(work, LONG_S)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_a_load_ends_with_the_report_about_it_and_a_folder_needs_none() -> None:
    core = Core()
    run(core.files.bring(entry("folder", 0)))
    assert core.lists == []
    run(core.bring(entry("a"), lambda _: status(AdapterReport(0)), lambda number: status(AdapterReport(number))))
    core.files.need([entry("a"), entry("folder", 0)])
    assert core.paths() == [["hf://acme/a@c"]], "the adapter stays needed, with one message"
    core.files.need([])
    assert core.paths()[1:] == [[]]


def test_after_a_failure_the_adapter_is_not_needed_and_an_earlier_load_of_it_stays() -> None:
    core = Core()
    with pytest.raises(ModelError, match=r"hf://acme/a@c: rank 1 on b: gone") as failed:
        run(core.bring(entry("a"), lambda number: status(AdapterReport(number, "rank 1 on b: gone"))))
    assert failed.value.fault == "Unreachable"
    assert core.paths() == [["hf://acme/a@c"], []]
    run(core.bring(entry("a"), lambda number: status(AdapterReport(number))))
    core.files.need([entry("a")])
    kept = core.lists[-1]
    with pytest.raises(ModelError):
        run(core.bring(entry("a"), lambda number: status(AdapterReport(number, "gone"))))
    assert core.lists[-1] == kept


def test_a_load_that_waits_stays_needed_while_other_adapters_come_and_go() -> None:
    core = Core()

    async def load_a_while_b_is_unloaded() -> None:
        core.files.need([entry("b")])
        load = asyncio.create_task(core.files.bring(entry("a")))
        await asyncio.sleep(0)
        core.files.need([])
        assert core.paths() == [["hf://acme/b@c"], ["hf://acme/b@c", "hf://acme/a@c"], ["hf://acme/a@c"]]
        core.files.received(status(AdapterReport(core.lists[-1][0].number)))
        await load
        core.files.need([entry("a")])
        assert len(core.lists) == 3, "the ranks have the files already"

    run(load_a_while_b_is_unloaded())


def test_two_loads_of_the_same_files_wait_one_after_the_other_and_each_gets_its_own_report() -> None:
    core = Core()

    async def load_twice() -> None:
        loads = [asyncio.create_task(core.files.bring(entry("a"))) for _ in range(2)]
        await asyncio.sleep(0)
        first = core.lists[-1][0].number
        assert len(core.lists) == 1
        core.files.received(status(AdapterReport(first, "rank 0 on a: no space")))
        with pytest.raises(ModelError, match="no space"):
            await loads[0]
        while core.lists[-1] == () or core.lists[-1][0].number == first:
            await asyncio.sleep(0)
        assert not loads[1].done()
        core.files.received(status(AdapterReport(core.lists[-1][0].number)))
        await asyncio.wait_for(loads[1], LONG_S)
        core.files.need([entry("a")])
        assert core.paths()[-1] == ["hf://acme/a@c"]

    run(load_twice())


def test_a_failed_load_does_not_bring_back_an_adapter_that_was_unloaded_meanwhile() -> None:
    core = Core()

    async def load_again_while_it_is_unloaded() -> None:
        core.files.need([entry("a")])
        load = asyncio.create_task(core.files.bring(entry("a")))
        await asyncio.sleep(0)
        core.files.need([])
        core.files.received(status(AdapterReport(core.lists[-1][0].number, "gone")))
        with pytest.raises(ModelError, match="gone"):
            await load
        assert core.lists[-1] == ()

    run(load_again_while_it_is_unloaded())


def test_a_serving_core_without_an_answer_ends_the_wait_and_a_starting_core_does_not() -> None:
    core = Core(most_s=-1.0)
    with pytest.raises(ModelError, match=r"no answer of all ranks within -1 s; see their logs"):
        run(
            core.bring(
                entry("a"),
                lambda _: status(state="starting"),
                lambda _: status(),
                lambda _: status(state="recovering"),
                lambda _: status(),
                lambda _: status(),
            )
        )


def test_the_first_list_of_a_front_replaces_that_of_an_earlier_front_even_if_it_is_empty() -> None:
    core = Core()
    core.files.need([])
    core.files.need([entry("folder", 0)])
    assert core.lists == [()]
