"""Ranks with a model in processes of their own, and their pool in this process. Faults happen between two collectives.

The launcher here restarts a fenced rank without ending the old process, as if the rank's machine had lost power or its
network connection. So a rank whose peer is stopped waits for this peer until an Abort comes.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any, Literal

from rayloom_engine.config import EngineConfig
from rayloom_engine.core.host_tier import HostTier
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core_server.host_index import begin_host_epoch
from rayloom_engine.core_server.ranks.assembly import replace_lost
from rayloom_engine.core_server.ranks.remote_executor import RemoteExecutor
from rayloom_engine.errors import RankLost
from rayloom_engine.kv.host_file import remove_files
from rayloom_engine.parallel import shared_sums
from rayloom_engine.protocol.ranks import Fence
from rayloom_engine.worker.activity import Activity
from rayloom_engine.worker.rank_server import RankPlace, RankServer
from rt_fake_rank import FakeLauncher, Ranks
from rt_forks import forking_context
from rt_stages import make_engine

Fault = Literal["killed", "stopped", "stuck"]
NUM_BLOCKS = 6


class RankServers(Ranks):
    """A process for each rank of a config, assembled as after a start of the engine."""

    def __init__(self, config: EngineConfig, folder: Path, *, uses_gloo: bool = False) -> None:
        """`folder`: folder of the file that causes a fault. `uses_gloo`: ranks of a stage compute sums over gloo."""
        # The ranks make the names of files in /dev/shm from the token, so no other run may have the same.
        super().__init__(config.hang_seconds, secrets.token_hex(16))
        self.pool.world_size = config.world_size
        self._config = config
        self._flag = folder / "fault"
        self._uses_gloo = uses_gloo
        self._processes: dict[int, Any] = {}  # by process id, including processes of lost ranks
        self._launcher = FakeLauncher(self.port, self._start_again, self.token)
        for rank in range(config.world_size):
            self._start(rank, 1)
        self.epoch = 0
        self.host_memory: tuple[str, ...] = ()  # the id of each rank's host memory in this epoch

    def meet(self, seconds: float = 90.0) -> None:
        """Begins an epoch: every rank joins a new group and has empty slots."""
        is_rebuild = self.epoch > 0
        self.epoch, loaded = self.assemble(NUM_BLOCKS, seconds=seconds, is_rebuild=is_rebuild)
        self.host_memory = tuple(rank.host_memory for rank in loaded)

    def strike(self, rank: int, fault: Fault) -> None:
        """Causes the fault when the rank next begins to wait for a peer. So the peers wait for this rank."""
        self._flag.write_text(f"{rank} {fault}")

    def has_struck(self) -> bool:
        return not self._flag.exists()

    def rebuild(self, loss: RankLost) -> RankLost:
        """Recovers like the EngineCore. Returns the loss with the rank that is to blame."""
        blamed = replace_lost(self.pool, loss)
        self.meet()
        return blamed

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join(60.0)
        remove_files(self.token)
        super().close()

    def _start(self, rank: int, incarnation: int) -> None:
        place = RankPlace(
            rank=rank,
            incarnation=incarnation,
            ranks_on_host=self._config.world_size,
            address=f"127.0.0.1:{self.port}",
            token=self.token,
        )
        arguments = (self._config, place, str(self._flag), self._uses_gloo)
        process: Any = forking_context().Process(target=_serve, args=arguments, daemon=True)
        process.start()
        self._processes[process.pid] = process

    def _start_again(self, fence: Fence) -> None:
        assert fence.incarnation is not None
        self._start(fence.rank, fence.incarnation + 1)


class RecoveringEngine:
    """An engine on RankServers, in an epoch of its own, that recovers from losses. `answers` can use it."""

    def __init__(self, ranks: RankServers, depth: int) -> None:
        ranks.meet()
        self._ranks = ranks
        self._engine = make_engine(RemoteExecutor(ranks.pool), ranks.epoch, depth=depth, num_host_slots=40)
        self.scheduler = self._engine.scheduler
        begin_host_epoch(self.tier, ranks.host_memory, ranks.token)
        self.add = self._engine.add
        self.losses: list[RankLost] = []
        self.lost_at = 0.0
        self.pause_s = 0.0  # seconds from noticing the last loss to the next outputs
        self.num_loaded_before = 0  # blocks that were loaded from host memory before the last loss

    @property
    def tier(self) -> HostTier:
        assert self.scheduler.pool.tier is not None
        return self.scheduler.pool.tier

    @property
    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished

    def step(self) -> list[SequenceOutput]:
        try:
            outputs = self._engine.step()
        except RankLost as loss:
            self.lost_at = time.monotonic()
            self.losses.append(self._ranks.rebuild(loss))
            self.scheduler.epoch = self._ranks.epoch
            self.num_loaded_before = self.tier.num_loaded
            begin_host_epoch(self.tier, self._ranks.host_memory, self._ranks.token)
            return []
        if outputs and self.losses and not self.pause_s:
            self.pause_s = time.monotonic() - self.lost_at
        return outputs


def _serve(config: EngineConfig, place: RankPlace, flag: str, uses_gloo: bool) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    begin_wait = Activity.__enter__

    def begin_or_fail(self: Activity) -> None:
        try:
            with open(flag) as file:
                rank, fault = file.read().split()
        except (OSError, ValueError):  # no flag, or not yet written
            rank, fault = "", ""
        if rank == str(place.rank):
            os.unlink(flag)
            if fault != "stuck":
                os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            while True:
                time.sleep(1.0)
        begin_wait(self)

    Activity.__enter__ = begin_or_fail  # type: ignore[method-assign]
    if uses_gloo:
        shared_sums.SharedTensorGroup = _refuse  # type: ignore[assignment,misc]
    RankServer(config, place).run()


def _refuse(*_: object) -> None:
    raise OSError("in another container")
