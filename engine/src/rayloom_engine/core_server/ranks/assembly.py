"""Assembly of the ranks, at the start and after a loss: attach, load, form a process group, allocate and warm up.

Ranks that survive a loss keep their process and weights. Only lost ranks are started again and load weights again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from rayloom_engine.common.restarts import RestartBudget
from rayloom_engine.core_server.ranks.attached import NO_BEAT, AttachedRank
from rayloom_engine.core_server.ranks.loading import Loading
from rayloom_engine.core_server.ranks.pool import RankPool, Reply
from rayloom_engine.core_server.ranks.standstill import rank_to_blame
from rayloom_engine.errors import ConfigError, ModelError, RankLost
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.protocol.ranks import Allocate, Beat, Done, Failed, Join, Loaded, OpenStore, StoreOpen

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
# After a loss, this process waits this many seconds. So it sees the end of all connections that the same cause has
# closed.
_BLAME_SECONDS = 0.2
_MEET_SECONDS = 60.0  # limit in seconds for all ranks to form a process group, or to allocate memory and warm up
_LATE_SECONDS = 5.0  # seconds within which all other ranks must answer once one rank has reported a failure
_STUCK_SECONDS = 120.0  # seconds without progress after which a rank that loads counts as lost in a rebuild
_MISSING_SECONDS = 30.0  # seconds without a connection after which a rank is fenced and started again in a rebuild


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
    """Prepares all ranks to run plans of a new epoch. Returns the epoch, and the ranks' Loaded messages, by rank.

    Every rank allocates `num_blocks` KV blocks; None: as many as the rank with the least memory can hold. Lost ranks
    are replaced until `deadline` (by time.monotonic) and within `budget`; after that, RankLost is raised. Raises
    ModelError or ConfigError if a rank cannot load. A rebuild never raises these errors, because the model has loaded
    before.
    """
    while True:
        try:
            loaded = _wait_until_loaded(pool, deadline, progress, is_rebuild)
            _check_commits(pool, loaded)
            _check_arithmetic(loaded, is_rebuild)
            if pool.world_size > 1:
                progress("rendezvous", 0, pool.world_size, "ranks")
                _meet(pool, is_rebuild)
            epoch = next_epoch()
            progress("warm_up", 0, 0, "")
            blocks = num_blocks or min(rank.num_blocks for rank in loaded)
            _ask(pool, list(pool.attached.values()), Allocate(pool.ticket(), epoch, blocks), Done, is_rebuild)
            return epoch, loaded
        except RankLost as loss:
            blamed = replace_lost(pool, loss)
            logger.warning("%s, while the ranks were assembled", blamed)
            wait = budget.wait_after_death(time.monotonic())
            if wait is None or time.monotonic() > deadline:
                raise blamed from loss
            time.sleep(wait)


def replace_lost(pool: RankPool, loss: RankLost) -> RankLost:
    """Ends the waits for a lost rank, and drops disconnected ranks. Returns the loss, with the rank to blame.

    If no rank is disconnected, and a live rank has reported a failure, this rank is kept the first time. If the rank
    fails again before a step has succeeded, it is dropped.
    """
    # A lost rank whose process is stopped or whose machine is off closes no connection. Without an order to abort, its
    # peers would wait in their collectives, miss the next rendezvous and be replaced as well.
    pool.abort_orders()
    # One cause may kill several ranks, and the wait lets all these deaths count as one loss. Also, a live rank may
    # report a dead peer before this process sees the end of the peer's connection.
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
    loading = Loading(
        pool.world_size,
        time.monotonic(),
        is_rebuild=is_rebuild,
        missing_s=_MISSING_SECONDS,
        stuck_s=_STUCK_SECONDS,
    )
    shown: set[str] = set()  # names of the phases that were reported
    while True:
        pool.take_arrivals()
        ranks = sorted(pool.attached.values(), key=lambda rank: rank.rank)
        loaded = {rank.rank: rank.loaded for rank in ranks if rank.loaded is not None}
        if len(loaded) == pool.world_size:
            if not is_rebuild and "load" not in shown:
                # No beat reported the phase "load": a small model may be loaded before the first beat.
                num_bytes = sum(message.bytes_read for message in loaded.values())
                progress("load", num_bytes, num_bytes, "bytes")
            return list(loaded.values())
        _check_time(pool, deadline, [rank.rank for rank in ranks], set(loaded))
        late = loading.observe(time.monotonic(), {rank.rank: rank.control.beat for rank in ranks}, loaded)
        for number in late.missing:
            pool.fence(number, None)
        if late.stuck is not None:
            number, phase = late.stuck
            raise RankLost(number, f"alive, but its phase {phase} makes no progress")
        shown.add(_report(pool, progress))
        _take_loaded(pool, is_rebuild)


def _check_time(pool: RankPool, deadline: float, attached: list[int], loaded: set[int]) -> None:
    """After the deadline, raises RankLost for the first unconnected rank, else for the first that has not loaded."""
    if time.monotonic() > deadline:
        late = [number for number in range(pool.world_size) if number not in attached]
        late = late or [number for number in attached if number not in loaded]
        raise RankLost(late[0], f"not there in time (missing ranks: {late})")


def _take_loaded(pool: RankPool, is_rebuild: bool) -> None:
    """Reads the ranks' replies. Stores all Loaded messages first, then raises if a rank could not load."""
    replies = pool.poll(_POLL_SECONDS)
    for number, reply in replies:
        if isinstance(reply, Loaded):
            pool.attached[number].loaded = reply  # sent once for each connection
    for number, reply in replies:
        if isinstance(reply, Failed) and reply.ticket == 0:
            raise _failure(number, reply, is_rebuild)


def _check_commits(pool: RankPool, loaded: list[Loaded]) -> None:
    """Raises RankLost if a rank has loaded another commit of a hub model than the core has found.

    The branch may have moved, or the rank's machine has an older copy and cannot reach the hub. The replacement of the
    rank gets the commit in Welcomed. All such ranks are replaced at once and count as one death, because they have one
    cause.
    """
    commit = pool.sizes.commit
    wrong = [number for number, rank in enumerate(loaded) if rank.commit != commit]
    for number in wrong[1:]:
        pool.drop(number)
    if wrong:
        raise RankLost(
            wrong[0],
            f"it has loaded commit {loaded[wrong[0]].commit} of the model, and this engine serves commit {commit}; set "
            "revision to a commit, so that all ranks load the same one from the beginning",
        )


def _check_arithmetic(loaded: list[Loaded], is_rebuild: bool) -> None:
    """Raises ConfigError (in a rebuild RankLost) if two ranks would send each other tensors of different types."""
    number = _first_misfit([rank.hidden_dtype for rank in loaded])
    if number is not None:
        own, its = loaded[0], loaded[number]
        message = (
            f"rank {number} computes hidden states in {its.hidden_dtype} ({its.arithmetic}), rank 0 in "
            f"{own.hidden_dtype} ({own.arithmetic}); give all ranks CPUs of one kind and the CPU library, or set "
            "RAYLOOM_CPU_ISA to torch and dtype to float32 for all"
        )
        raise RankLost(number, message) if is_rebuild else ConfigError(message)
    number = _first_misfit([rank.arithmetic for rank in loaded])
    if number is not None:
        logger.warning(
            "rank 0 computes with %s, rank %d with %s: once a rank is replaced, answers may differ in their last bits; "
            "give all ranks the same image and hardware of one kind, or the same RAYLOOM_CPU_ISA",
            loaded[0].arithmetic,
            number,
            loaded[number].arithmetic,
        )


def _first_misfit(values: Sequence[str]) -> int | None:
    """Returns the index of the first value that differs from `values[0]`; None if all values are equal."""
    return next((index for index, value in enumerate(values) if value != values[0]), None)


def _report(pool: RankPool, progress: Progress) -> str:
    """Reports the launcher's phase until all ranks are attached, then the slowest rank's phase. Returns the phase."""
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
    """Returns (phase, units done, total, unit), summed over the ranks that are in the earliest phase.

    Returns None while a rank has not begun to load: a sum without this rank would look like the sum of all ranks.
    """
    loading = [beat for beat in beats if beat.phase in _LOADING]
    if not loading or any(beat.phase == NO_BEAT.phase for beat in beats):
        return None
    name = min((beat.phase for beat in loading), key=_LOADING.index)
    behind = [beat for beat in loading if beat.phase == name]
    return name, sum(beat.done for beat in behind), sum(beat.total for beat in behind), behind[0].unit


_LOADING = ["resolve", "convert", "import", "load", "kv_cache", "warm_up"]  # phases of a rank's start, in order


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
            # A rank without an answer is blamed, even if another rank has reported a failure. The other rank failed
            # because it waited for the silent rank.
            late = rank_to_blame({number: pool.attached[number].control.beat for number in waiting})
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
        # This rank, or an earlier start of it, has loaded before, so the settings and the model are not the cause.
        return RankLost(rank, failed.message)
    if failed.kind == "config":
        return ConfigError(failed.message)
    if failed.kind == "model":
        return ModelError(failed.message)
    return RankLost(rank, failed.message)
