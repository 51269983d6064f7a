"""How ranks come together, at the start and after a loss: attach and load, meet, allocate and warm up.

Ranks that lived through a loss keep process and weights, so that only what died is started and read again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from rayloom_engine.common.restarts import RestartBudget
from rayloom_engine.core_server.ranks.pool import NO_BEAT, AttachedRank, RankPool, Reply
from rayloom_engine.core_server.ranks.standstill import who_stands_still
from rayloom_engine.errors import ConfigError, ModelError, RankLost
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.protocol.ranks import Allocate, Beat, Done, Failed, Join, Loaded, OpenStore, StoreOpen

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_BLAME_SECONDS = 0.2  # until the end of one rank shows in all its consequences
_MEET_SECONDS = 60.0  # for a process group, or memory and a warm-up step
_LATE_SECONDS = 5.0  # after one rank's failure to meet the others must have an answer too
_STUCK_SECONDS = 120.0  # a rank that loads and does not get on for so long is started again, in a rebuild
_MISSING_SECONDS = 30.0  # a rank that should be there and does not dial for so long is started again


def assemble(
    pool: RankPool,
    next_epoch: Callable[[], int],
    num_blocks: int | None,
    deadline: float,
    budget: RestartBudget,
    progress: Progress,
    *,
    is_rebuild: bool,
) -> tuple[int, list[Loaded]]:
    """All ranks, ready to run plans of the returned epoch, and what they said about their weights, by rank.

    Every rank takes `num_blocks` KV blocks, or what all of them have room for. Losses on the way are made good until
    `deadline` (by time.monotonic) and within `budget`; after that RankLost is raised. Raises ModelError or ConfigError
    when a rank cannot load, unless this is a rebuild: what loaded once is then no fault of the user's.
    """
    while True:
        try:
            loaded = _wait_until_loaded(pool, deadline, progress, is_rebuild)
            if pool.world_size > 1:
                progress("rendezvous", 0, pool.world_size, "ranks")
                _meet(pool, is_rebuild)
            epoch = next_epoch()
            progress("warm_up", 0, 0, "")
            blocks = num_blocks or min(rank.num_blocks for rank in loaded)
            _ask(pool, list(pool.attached.values()), Allocate(pool.ticket(), epoch, blocks), Done, is_rebuild)
            return epoch, loaded
        except RankLost as loss:
            blamed = let_go(pool, loss)
            logger.warning("%s while the ranks were put together", blamed)
            wait = budget.wait_after_death(time.monotonic())
            if wait is None or time.monotonic() > deadline:
                raise blamed from loss
            time.sleep(wait)


def let_go(pool: RankPool, loss: RankLost) -> RankLost:
    """After a loss: what is gone is replaced. A rank that failed alone is used again, once. Returns who is to blame."""
    # A rank that complains of a dead peer may be heard before the peer's end is seen, and what ended one rank may have
    # ended others: that is one loss, not several.
    time.sleep(_BLAME_SECONDS)
    ended = pool.drop_ended()
    if loss.is_alive and ended:
        return RankLost(ended[0], f"its connection ended ({loss})")
    if loss.is_alive and loss.rank not in pool.suspects:
        pool.suspects.add(loss.rank)
    else:
        pool.drop(loss.rank)
    return loss


def _wait_until_loaded(pool: RankPool, deadline: float, progress: Progress, is_rebuild: bool) -> list[Loaded]:
    patience = _MISSING_SECONDS
    fence_at = time.monotonic() + patience
    marks: dict[int, tuple[str, int]] = {}  # rank -> how far its loading is
    marked_at: dict[int, float] = {}
    shown: set[str] = set()  # phases
    while True:
        pool.take_arrivals()
        ranks = sorted(pool.attached.values(), key=lambda rank: rank.rank)
        loaded = [rank.loaded for rank in ranks if rank.loaded is not None]
        if len(loaded) == pool.world_size:
            if not is_rebuild and "load" not in shown:
                # A small model may be in place before anybody looked.
                num_bytes = sum(rank.bytes_read for rank in loaded)
                progress("load", num_bytes, num_bytes, "bytes")
            return loaded
        missing = sorted(set(range(pool.world_size)) - {rank.rank for rank in ranks})
        if time.monotonic() > deadline:
            late = missing or [rank.rank for rank in ranks if rank.loaded is None]
            raise RankLost(late[0], f"not there in time (missing ranks: {late})")
        if is_rebuild and missing and time.monotonic() > fence_at:
            # Nobody has seen it end, so its launcher takes it for alive: it may be stopped, or cut off from here.
            patience *= 2  # its node may need long to bring up what it runs in
            fence_at = time.monotonic() + patience
            for number in missing:
                pool.fence(number, None)
        for rank in ranks:
            mark = (rank.control.beat.phase, rank.control.beat.done)
            if rank.loaded is not None or marks.get(rank.rank) != mark:
                marks[rank.rank], marked_at[rank.rank] = mark, time.monotonic()
            elif is_rebuild and time.monotonic() - marked_at[rank.rank] > _STUCK_SECONDS:
                raise RankLost(rank.rank, f"alive, but its phase {mark[0]} stands still for {_STUCK_SECONDS:g} s")
        shown.add(_report(pool, progress))
        replies = pool.poll(_POLL_SECONDS)
        for number, reply in replies:
            if isinstance(reply, Loaded):
                pool.attached[number].loaded = reply  # said once, so it is noted whatever another rank says
        for number, reply in replies:
            if isinstance(reply, Failed) and reply.ticket == 0:
                raise _failure(number, reply, is_rebuild)


def _report(pool: RankPool, progress: Progress) -> str:
    """What the slowest part is at: the launcher until all ranks are attached, then the loading. Returns the phase."""
    if len(pool.attached) < pool.world_size:
        phase = pool.launch_phase
        if phase is not None:
            progress(phase.name, phase.done, phase.total, phase.unit)
        return phase.name if phase is not None else ""
    slowest = slowest_phase(pool.beats())
    if slowest is None:
        return ""
    progress(*slowest)
    return slowest[0]


def slowest_phase(beats: Sequence[Beat]) -> tuple[str, int, int, str] | None:
    """The phase, done, total and unit of the ranks that are furthest behind, None while one has not begun to load.

    One that was not heard yet has not begun, and a sum without it would be taken for that of all.
    """
    loading = [beat for beat in beats if beat.phase in _LOADING]
    if not loading or any(beat.phase == NO_BEAT.phase for beat in beats):
        return None
    name = min((beat.phase for beat in loading), key=_LOADING.index)
    behind = [beat for beat in loading if beat.phase == name]
    return name, sum(beat.done for beat in behind), sum(beat.total for beat in behind), behind[0].unit


_LOADING = ["resolve", "convert", "import", "load", "kv_cache", "warm_up"]  # phases of a rank, in order


def _meet(pool: RankPool, is_rebuild: bool) -> None:
    first, *_ = sorted(pool.attached.values(), key=lambda rank: rank.rank)
    store = _ask(pool, [first], OpenStore(pool.ticket()), StoreOpen, is_rebuild)[0]
    assert isinstance(store, StoreOpen)
    _ask(pool, list(pool.attached.values()), Join(pool.ticket(), store.host, store.port), Done, is_rebuild)


def _ask(
    pool: RankPool,
    ranks: list[AttachedRank],
    order: OpenStore | Join | Allocate,
    kind: type[Reply],
    is_rebuild: bool,
) -> list[Reply]:
    """Sends an order to some ranks and waits until each has answered it. Raises RankLost, ConfigError, ModelError."""
    pool.order(order, ranks)
    waiting = {rank.rank for rank in ranks}
    replies: list[Reply] = []
    complaint: RankLost | None = None
    deadline = time.monotonic() + _MEET_SECONDS
    while waiting:
        if time.monotonic() > deadline:
            # Who says nothing while another says that it failed is what that one waited for.
            late = who_stands_still({number: pool.attached[number].control.beat for number in waiting})
            raise RankLost(late, f"no answer to {type(order).__name__} in time")
        for number, reply in pool.poll(_POLL_SECONDS):
            if reply.ticket != order.ticket:
                continue
            waiting.discard(number)
            if isinstance(reply, Failed):
                if reply.kind != "rank":
                    raise _failure(number, reply, is_rebuild)
                complaint = complaint or RankLost(number, reply.message, is_alive=True)
                deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
            elif isinstance(reply, kind):
                replies.append(reply)
        if arrived := pool.take_arrivals():
            raise RankLost(arrived[0], "it dialled again", is_alive=True)
    if complaint is not None:
        raise complaint
    return replies


def _failure(rank: int, failed: Failed, is_rebuild: bool) -> Exception:
    if is_rebuild:
        return RankLost(rank, failed.message)  # it, or one like it, could do this before
    if failed.kind == "config":
        return ConfigError(failed.message)
    if failed.kind == "model":
        return ModelError(failed.message)
    return RankLost(rank, failed.message)
