"""The launcher's decisions, with a starter that starts no processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from rayloom_engine.config import parse_config
from rayloom_engine.errors import ConfigError, EngineDead
from rayloom_engine.launcher.__main__ import Launcher
from rayloom_engine.launcher.process_ranks import ProcessRanks
from rayloom_engine.launcher.starter import NO_CORE
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.protocol.ranks import Fence
from rayloom_engine.worker import machine


class _End(Exception):
    """Raised when the script is over."""


class PaperRanks:
    """A RankStarter with a script: each entry is the result of a call of `wait`, or a function that computes it."""

    def __init__(self, *script: list[tuple[int, str]] | Callable[[], list[tuple[int, str]]]) -> None:
        self.started: list[tuple[int, int]] = []
        self.killed: list[int] = []
        self._script = deque(script)

    def prepare(self, progress: object) -> None:
        pass

    def start(self, rank: int, incarnation: int) -> None:
        self.started.append((rank, incarnation))

    def kill(self, rank: int) -> None:
        self.killed.append(rank)

    def wait(self, timeout_s: float) -> list[tuple[int, str]]:
        if not self._script:
            raise _End
        entry = self._script.popleft()
        return entry() if callable(entry) else entry

    def close(self) -> None:
        pass


class PaperLine:
    def __init__(self, *fences: Fence) -> None:
        self.fences = deque(fences)

    def progress(self, phase: str, done: int, total: int, unit: str) -> None:
        pass


def _run(ranks: PaperRanks, *fences: Fence, budget: int = 5) -> None:
    config = parse_config({"pipeline_parallel_size": 2, "executor": "mp", "restart_budget": budget})
    with pytest.raises(_End):
        Launcher(config, ranks, PaperLine(*fences), 100).run()  # type: ignore[arg-type]


def test_every_rank_is_started_and_one_that_ends_is_started_again_with_a_higher_number() -> None:
    ranks = PaperRanks([], [(1, "SIGKILL")], [])
    _run(ranks)
    assert ranks.started == [(0, 100), (1, 101), (1, 102)]


def test_a_rank_that_keeps_ending_spends_the_budget() -> None:
    ranks = PaperRanks([], [(1, "SIGSEGV")], [(1, "SIGSEGV")])
    config = parse_config({"pipeline_parallel_size": 2, "executor": "mp", "restart_budget": 1})
    with pytest.raises(EngineDead, match=r"rank 1 ended \(SIGSEGV\); restart budget of 1 exhausted"):
        Launcher(config, ranks, PaperLine(), 100).run()  # type: ignore[arg-type]


def test_a_fence_ends_that_start_of_the_rank_and_no_other() -> None:
    ranks = PaperRanks([], [])
    _run(ranks, Fence(1, 7), Fence(0, 100), Fence(1, None))
    assert ranks.killed == [0, 1]


@pytest.mark.parametrize("cause", [NO_CORE, "SIGKILL"])
def test_ends_that_the_core_requested_or_caused_use_no_budget(cause: str) -> None:
    ranks = PaperRanks([], [(1, cause)])
    _run(ranks, *([] if cause == NO_CORE else [Fence(1, 101)]), budget=0)


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen by the core", "unseen"])
def test_an_end_that_the_core_saw_as_well_is_taken_off_the_budget(is_seen: bool) -> None:
    line = PaperLine()

    def end_once_more() -> list[tuple[int, str]]:
        ended = ranks.started[-1][1]
        if is_seen:
            line.fences.extend([Fence(1, ended)] * 2)  # a fence may be sent twice
        return [(1, "SIGSEGV")]

    ranks = PaperRanks([], *[end_once_more, []] * 3)
    config = parse_config({"pipeline_parallel_size": 2, "executor": "mp", "restart_budget": 1})
    with pytest.raises(_End if is_seen else EngineDead):
        Launcher(config, ranks, line, 100).run()  # type: ignore[arg-type]


def test_fewer_accelerators_than_ranks_are_refused_before_anything_starts(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/nvidia5"])
    two = {"pipeline_parallel_size": 2, "executor": "mp"}
    with pytest.raises(ConfigError, match="2 ranks need an accelerator each, and this machine has 1"):
        ProcessRanks(parse_config(two), tmp_path, "127.0.0.1:1").prepare(no_progress)  # type: ignore[arg-type]
    on_cpu = ProcessRanks(parse_config({**two, "device": "cpu"}), tmp_path, "127.0.0.1:1")  # type: ignore[arg-type]
    on_cpu.prepare(no_progress)
    on_cpu.close()
