"""The commit of a hub model: a rank loads the core's, and a rank with another one is replaced."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.models.checkpoint import source
from rayloom_engine.protocol.ranks import Loaded, Welcomed
from rayloom_engine.worker.rank_server import RankPlace, RankServer
from rt_fake_rank import TOKEN, FakeLauncher, Ranks, make_loaded
from rt_server import wait_until
from rt_stages import stage_config
from rt_tiny import tiny_variant

LONG_S = 60.0


@pytest.mark.parametrize(("given", "loaded"), [(None, "newest"), ("first", "first")])
def test_a_rank_loads_the_commit_that_the_core_has_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, loaded: str
) -> None:
    model = tiny_variant(tmp_path, "qwen2-some-windows")
    monkeypatch.setattr(source, "download", lambda name, revision, *_: (model, revision or "newest"))
    ranks = Ranks()
    ranks.pool.world_size = 1
    ranks.pool.sizes = Welcomed(commit=given)
    place = RankPlace(rank=0, incarnation=1, ranks_on_host=1, address=f"127.0.0.1:{ranks.port}", token=TOKEN)
    config = stage_config(model).model_copy(update={"model": "acme/model"})
    thread = threading.Thread(target=RankServer(config, place).serve_core, daemon=True)
    thread.start()
    try:
        wait_until(lambda: bool(ranks.pool.take_arrivals()), LONG_S, lambda: "the rank is attached")
        replies: list[Any] = []
        wait_until(lambda: bool(replies.extend(ranks.pool.poll(1.0)) or replies), LONG_S, lambda: "the rank has loaded")
        ((_, reply),) = replies
        assert isinstance(reply, Loaded)
        assert reply.commit == loaded
    finally:
        ranks.close()
        thread.join(LONG_S)


def test_ranks_with_another_commit_are_replaced_together_and_count_as_one_death() -> None:
    ranks = Ranks()
    ranks.pool.sizes = Welcomed(commit="new")
    loaded = make_loaded(commit="new")
    launcher = FakeLauncher(ranks.port, lambda fence: ranks.start(fence.rank, incarnation=2, first=loaded))
    for rank in (0, 1):
        ranks.start(rank, first=make_loaded(commit="old"))
    ranks.assemble(budget=1)
    assert sorted(fence.rank for fence in launcher.fences) == [0, 1]
    ranks.close()


@pytest.mark.parametrize("is_rebuild", [False, True])
def test_a_rank_with_another_commit_of_the_model_is_replaced(is_rebuild: bool) -> None:
    ranks = Ranks()
    ranks.pool.sizes = Welcomed(commit="new")
    second = make_loaded(commit="new")
    launcher = FakeLauncher(ranks.port, lambda fence: ranks.start(1, incarnation=2, first=second))
    ranks.start(0, first=make_loaded(commit="new"))
    ranks.start(1, first=make_loaded(commit="old"))
    _, loaded = ranks.assemble(is_rebuild=is_rebuild)
    assert [fence.rank for fence in launcher.fences] == [1]
    assert [rank.commit for rank in loaded] == ["new", "new"]
    ranks.close()
