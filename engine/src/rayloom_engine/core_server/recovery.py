"""Recovery: keeps an engine running on rank processes, which are assembled again after every loss of a rank.

    ASSEMBLING   ranks attach, load, form a process group and warm up      core_server/ranks/assembly.py
    SERVING      steps run                                                 core_server/loop.py
    LOST         a rank is gone: the launcher replaces it, the death is counted, sequences keep their ids and wait

    ASSEMBLING --> SERVING     every rank is warmed up: a new epoch begins, and the engine replays its sequences
    ASSEMBLING --> EngineDead  `rebuild_seconds` or the restart budget is spent
    SERVING    --> LOST        RankLost
    LOST       --> ASSEMBLING  with the surviving ranks, which keep their weights
    LOST       --> EngineDead  the restart budget is spent, or the ranks belong to a job, which must restart as a whole

If the EngineCore process itself dies, the supervisor restarts it. The new process begins in ASSEMBLING and adopts the
ranks that connect to it.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from rayloom_engine.build import EngineSizes, FoundModel, engine_on, served_model
from rayloom_engine.common.restarts import RestartBudget
from rayloom_engine.config import EngineConfig
from rayloom_engine.core_server.context import CoreContext
from rayloom_engine.core_server.host_index import begin_host_epoch
from rayloom_engine.core_server.loop import Core
from rayloom_engine.core_server.ranks.assembly import assemble, replace_lost
from rayloom_engine.core_server.ranks.pool import RankPool
from rayloom_engine.core_server.ranks.remote_executor import RemoteExecutor
from rayloom_engine.core_server.run_folder import KeptSizes
from rayloom_engine.errors import EngineDead, RankLost
from rayloom_engine.protocol.ranks import Loaded, Welcomed
from rayloom_engine.worker.start import forms_of

logger = logging.getLogger(__name__)


class RecoveryState(Enum):
    ASSEMBLING = "assembling"
    SERVING = "serving"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Assembly:
    """The ranks that are ready to run plans of `epoch`."""

    epoch: int
    loaded: list[Loaded]  # the ranks' Loaded messages, by rank


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """Decides when a loss ends the engine. Its only state is `budget`, which counts deaths."""

    config: EngineConfig
    budget: RestartBudget

    @classmethod
    def of(cls, config: EngineConfig) -> RecoveryLimits:
        return cls(config, RestartBudget(0 if config.executor == "external" else config.restart_budget))

    @property
    def is_job(self) -> bool:
        """True if the ranks belong to a job (executor external): they restart only with the whole job."""
        return self.config.executor == "external"

    def deadline(self, now: float, *, is_rebuild: bool) -> float:
        """Returns the time by which the ranks must be assembled, by the same clock as `now`.

        The first start has no limit, because it may wait for room in the cluster. The status shows this wait.
        """
        return now + self.config.rebuild_seconds if is_rebuild else math.inf

    def not_assembled(self) -> str:
        """Returns why the engine gives up while ASSEMBLING. The error message has this text after the loss's cause."""
        if self.is_job:
            return "start the job again"
        return f"not mended within {self.config.rebuild_seconds:g} s and {self.config.restart_budget} restarts"

    def count_death(self, now: float, *, is_narrower: bool) -> str:
        """Counts a death while SERVING. Returns the reason for giving up, or an empty string to continue.

        `is_narrower`: the death left fewer suspects. The budget does not count such a death, because the number of
        suspects already limits these deaths. No back-off follows a death while SERVING: the budget's back-off is
        for ranks that fail during their start.
        """
        if self.is_job:
            return "start the job again"
        if is_narrower or self.budget.wait_after_death(now) is not None:
            return ""
        return f"restart budget of {self.config.restart_budget} exhausted"


class RecoveryMachine:
    """The state machine of this module's docstring, run by the EngineCore's main thread."""

    def __init__(self, context: CoreContext, pool: RankPool, model: FoundModel, epoch: int) -> None:
        """`epoch`: the epoch of the first assembly. Later assemblies draw new epochs."""
        self._state = RecoveryState.ASSEMBLING
        self._context = context
        self._pool = pool
        self._model = model
        self._epochs = itertools.chain([epoch], iter(context.folder.draw_epoch, 0))
        self._limits = RecoveryLimits.of(context.config)
        self._executor = RemoteExecutor(pool)
        self._is_rebuild = context.folder.sizes() is not None  # an earlier EngineCore process has assembled ranks
        self._deadline = self._limits.deadline(time.monotonic(), is_rebuild=self._is_rebuild)
        self._assembly = Assembly(epoch, [])  # the last assembly
        self._loss = RankLost(0, "")  # the last loss
        # None until the first assembly. The core keeps its engine and sequences when ranks are lost.
        self._core: Core | None = None

    def run(self) -> NoReturn:
        """Serves until the process ends. Raises EngineDead if it gives up.

        The first assembly may raise ModelError or ConfigError.
        """
        act = {
            RecoveryState.ASSEMBLING: self._assemble,
            RecoveryState.SERVING: self._serve,
            RecoveryState.LOST: self._replace,
        }
        while True:
            self._state = act[self._state]()

    def _assemble(self) -> RecoveryState:
        pool = self._pool
        sizes = self._context.folder.sizes()
        pool.sizes = Welcomed(commit=self._model.resolved.commit) if sizes is None else sizes.welcomed()
        try:
            epoch, loaded = assemble(
                pool,
                self._epochs.__next__,
                pool.sizes.num_kv_blocks,
                self._deadline,
                self._limits.budget,
                self._context.state.begin_phase,
                is_rebuild=self._is_rebuild,
            )
        except RankLost as loss:
            raise self._dead(loss, self._limits.not_assembled()) from loss
        self._assembly = Assembly(epoch, loaded)
        return RecoveryState.SERVING

    def _serve(self) -> RecoveryState:
        context = self._context
        core = self._core = self._core or self._build()
        core.begin_epoch(self._assembly.epoch)
        memory = tuple(rank.host_memory for rank in self._assembly.loaded)
        begin_host_epoch(core.host_tier, memory, context.folder.token())
        smallest = min(self._assembly.loaded, key=lambda rank: rank.num_blocks)
        began = context.prepare_to_serve(core.model, smallest.kv_explanation, is_restart=self._is_rebuild)
        self._is_rebuild = True
        try:
            core.run(context.inbox, began)
        except RankLost as loss:
            self._loss = loss
            return RecoveryState.LOST

    def _replace(self) -> RecoveryState:
        """Drops the lost ranks, reports the loss, resets the scheduler and counts the death. May raise EngineDead."""
        context = self._context
        lost_at = time.monotonic()
        nodes = {number: rank.greeting.node for number, rank in self._pool.attached.items()}
        loss = replace_lost(self._pool, self._loss)
        logger.warning("%s", loss)
        context.state.recovering(loss.rank, nodes.get(loss.rank, ""), str(loss), lost_at)
        context.io.flush_status()
        assert self._core is not None
        self._core.forget_ranks()
        self._deadline = self._limits.deadline(time.monotonic(), is_rebuild=True)
        is_narrower = context.box.died(was_silent=loss.is_silent)
        verdict = self._limits.count_death(time.monotonic(), is_narrower=is_narrower)
        if verdict:
            raise self._dead(loss, verdict) from self._loss
        return RecoveryState.ASSEMBLING

    def _build(self) -> Core:
        """Builds the engine after the first assembly. Every later assembly and process uses the same sizes."""
        context = self._context
        epoch = self._assembly.epoch
        loaded = self._assembly.loaded
        kept = context.folder.sizes()
        sizes = KeptSizes(
            num_kv_blocks=kept.num_kv_blocks if kept else min(rank.num_blocks for rank in loaded),
            max_model_len=kept.max_model_len if kept else min(rank.max_model_len for rank in loaded),
            commit=self._model.resolved.commit,
        )
        engine_sizes = EngineSizes(
            num_blocks=sizes.num_kv_blocks,
            max_model_len=sizes.max_model_len,
            num_step_tokens=loaded[0].num_step_tokens,
            num_kept_blocks=loaded[0].num_kept_blocks,
            num_host_slots=min(rank.num_host_slots for rank in loaded),
        )
        # The rank that samples has its own forms. The core needs forms only to cut drafts.
        forms = None if context.config.speculation == "off" else forms_of(self._model.resolved, self._model.shape)
        engine = engine_on(context.config, self._executor, self._model.shape, engine_sizes, epoch, forms)
        if forms is not None:
            forms.load_when_idle(lambda: engine.times.num_steps)
        if kept is None:
            context.folder.keep_sizes(sizes)
        model = served_model(
            context.config,
            self._model,
            loaded[0],
            weight_bytes=sum(rank.weight_bytes for rank in loaded),
            max_model_len=sizes.max_model_len,
        )
        return Core(engine, model, context.io, context.state, context.box, self._executor.check)

    def _dead(self, loss: RankLost, verdict: str) -> EngineDead:
        return EngineDead(f"{loss}; {verdict}{self._pool.memory_kills.sentence(time.monotonic())}")
