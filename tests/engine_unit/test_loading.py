"""Late ranks of an assembly: missing ranks, and ranks whose loading makes no progress. Tests set the clock."""

from __future__ import annotations

from rayloom_engine.core_server.ranks.loading import Late, Loading
from rayloom_engine.protocol.ranks import Beat


def loading(*, is_rebuild: bool) -> Loading:
    return Loading(2, 0.0, is_rebuild=is_rebuild, missing_s=30.0, stuck_s=120.0)


def beat(done: int, phase: str = "load", cpu_s: float = 0.0) -> Beat:
    return Beat(phase=phase, step=0, memory_bytes=1, done=done, cpu_s=cpu_s)


def test_a_missing_rank_of_a_rebuild_is_fenced_after_a_term_that_doubles() -> None:
    watch = loading(is_rebuild=True)
    late = {now: watch.observe(now, {0: beat(int(now))}, ()) for now in (30.0, 30.1, 90.1, 90.2, 210.3)}
    assert [now for now, found in late.items() if found == Late(missing=(1,))] == [30.1, 90.2, 210.3]


def test_a_rank_of_a_rebuild_is_stuck_when_its_loading_does_not_advance() -> None:
    watch = loading(is_rebuild=True)
    assert watch.observe(0.0, {0: beat(1), 1: beat(1)}, ()) == Late()
    assert watch.observe(100.0, {0: beat(2), 1: beat(1)}, ()) == Late()
    assert watch.observe(120.1, {0: beat(2), 1: beat(1)}, ()) == Late(stuck=(1, "load"))


def test_a_rank_of_a_rebuild_that_imports_slowly_beside_other_work_is_not_stuck() -> None:
    """The rank gets 0.6 s of CPU time every 10 s, and imports for minutes. Then it blocks, and is stuck 120 s later."""
    watch = loading(is_rebuild=True)
    for now in range(0, 301, 10):
        assert watch.observe(now, {0: beat(0, "import", cpu_s=0.06 * now)}, ()).stuck is None
    late = {now: watch.observe(now, {0: beat(0, "import", cpu_s=18.0)}, ()).stuck for now in (420.0, 420.1)}
    assert late == {420.0: None, 420.1: (0, "import")}


def test_a_rank_of_a_rebuild_that_only_uses_cpu_time_is_stuck_after_ten_times_its_patience_of_it() -> None:
    watch = loading(is_rebuild=True)
    late = {now: watch.observe(now, {0: beat(1, cpu_s=now)}, ()).stuck for now in (0.0, *range(100, 1201, 100), 1201)}
    assert [now for now, stuck in late.items() if stuck] == [1201]


def test_another_phase_and_another_rank_of_the_same_number_are_an_advance() -> None:
    watch = loading(is_rebuild=True)
    watch.observe(0.0, {0: beat(5), 1: beat(5)}, ())
    assert watch.observe(121.0, {0: beat(5, "warm_up"), 1: beat(0, "import")}, ()) == Late()


def test_a_rank_that_has_loaded_is_never_stuck() -> None:
    watch = loading(is_rebuild=True)
    for now in (0.0, 121.0, 500.0):
        assert watch.observe(now, {0: beat(1), 1: beat(int(now))}, {0}) == Late()


def test_no_rank_of_a_first_start_is_late() -> None:
    watch = loading(is_rebuild=False)
    for now in (0.0, 10_000.0):
        assert watch.observe(now, {0: beat(1)}, ()) == Late()
