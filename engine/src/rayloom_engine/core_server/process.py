"""The core process, `python -m rayloom_engine.core_server.process`: the engine in the main thread, sockets in a second.

The main thread only computes; the I/O thread answers fronts at once, also while a step or the loading takes seconds.
They meet in two places: the inbox (front messages, in order) and CoreState (attributes that the main thread writes).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from rayloom_engine.build import EngineSizes, build_found_engine, engine_on
from rayloom_engine.common.process import (
    EXIT_CONFIG,
    EXIT_GIVEN_UP,
    PULSE_SECONDS,
    end_with_parent,
    forget_failure,
    set_up_logging,
    start_pulse,
    thread_cpu_clock,
    write_failure,
)
from rayloom_engine.common.restarts import RestartBudget
from rayloom_engine.config import EngineConfig, load_config
from rayloom_engine.core.engine import Engine
from rayloom_engine.core_server.black_box import BlackBox
from rayloom_engine.core_server.loop import Core
from rayloom_engine.core_server.ranks.assembly import assemble, let_go
from rayloom_engine.core_server.ranks.pool import RankPool
from rayloom_engine.core_server.ranks.remote_executor import RemoteExecutor
from rayloom_engine.core_server.ranks.stillness import Stillness
from rayloom_engine.core_server.sockets import CoreIo, Inbox
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.errors import ConfigError, CorruptRank, EngineDead, ModelError, RankLost
from rayloom_engine.models.checkpoint.source import ResolvedModel
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.protocol.messages import ModelStatus
from rayloom_engine.protocol.ranks import Loaded, Welcomed
from rayloom_engine.worker.start import find_model

logger = logging.getLogger(__name__)

_CORRUPT_CURE = "check the model's files and the machine's memory; float16 may overflow: use bfloat16 or float32"


class CoreProcess:
    """One start of the core. What outlives it lies in the run folder: epoch, black box, the first core's sizes."""

    def __init__(self, config: EngineConfig, run_dir: Path, address: str, rank_fd: int | None) -> None:
        self._config = config
        self._run_dir = run_dir
        self._token = (run_dir / "token").read_text().strip()
        self._rank_fd = rank_fd
        self._epoch = _draw_epoch(run_dir)
        self._box = BlackBox(run_dir)
        self._state = CoreState(epoch=self._epoch, executor=config.executor, hang_seconds=config.hang_seconds)
        self._state.be_patient(config.hang_seconds)
        self._inbox = Inbox(deque(), threading.Event())
        self._io = CoreIo(address, self._token, self._inbox, self._state.status)
        self._stillness = Stillness()  # of the main thread
        self._main_cpu_clock = thread_cpu_clock()
        self._num_pulses = 0

    def run(self) -> int:
        """Serves for ever; returns an exit code only when it cannot start or go on."""
        self._io.start()
        pool = None
        if self._rank_fd is not None:
            # Before anything that takes long, so that ranks which come early find a core.
            listener = socket.socket(fileno=self._rank_fd)
            pool = RankPool(listener, self._token, self._config.world_size, self._config.hang_seconds)
            self._state.pool = pool
        try:
            resolved, shape = find_model(self._config, self._state.begin_phase, has_weights=pool is None)
            if pool is None:
                self._serve_alone(resolved, shape)
            else:
                self._serve_with_ranks(pool, resolved, shape)
        except (ModelError, ConfigError) as error:
            return self._fail(error, EXIT_CONFIG)
        except EngineDead as error:
            return self._fail(error, EXIT_GIVEN_UP)
        except CorruptRank as error:
            # The next core loads the weights again. Its supervisor counts this death, and gives up after too many.
            logger.error("%s; the core ends", error)
            write_failure(self._run_dir, f"{error}; {_CORRUPT_CURE}")
            os._exit(1)

    def is_up(self) -> bool:
        """For the pulse: whether the start is done. Ends this process when its main thread hangs."""
        state = self._state
        # A core that is its own rank computes as soon as it has loaded, and says that it serves after the first step.
        mark = state.mark() if state.state == "serving" or state.rank is not None else None
        # Pulses are counted, not seconds: a core that was stopped for a while has not hung.
        self._num_pulses += 1
        self._stillness.observe(self._num_pulses * PULSE_SECONDS, mark, self._main_cpu_clock())
        state.quiet_s = self._stillness.quiet_s
        # One rank that takes nothing may hold the main thread up for hang_seconds, and is blamed then.
        patience = state.patience_s * (1 if state.pool is None else 2)
        if self._stillness.is_hung(patience):
            logger.error("the main thread stands still for %g s; the core ends", self._stillness.still_s)
            faulthandler.dump_traceback()
            os._exit(1)
        return state.state != "starting"

    def _fail(self, error: Exception, code: int) -> int:
        logger.error("%s", error)
        write_failure(self._run_dir, str(error))
        self._state.failed(str(error))
        self._io.flush_status()
        return code

    def _serve_alone(self, resolved: ResolvedModel, shape: ModelShape) -> NoReturn:
        """The core is its own only rank."""
        sizes = self._sizes()
        config = self._config.model_copy(update=sizes)
        built = build_found_engine(config, resolved, shape, self._epoch, self._state.begin_phase)
        self._keep_sizes(built.engine, built.model)
        self._state.rank = built.rank
        began = self._prepare_to_begin(built.model, built.kv_explanation, is_restart=bool(sizes))
        Core(built.engine, built.model, self._io, self._state, self._box).run(self._inbox, began)
        raise AssertionError("the loop never ends")

    def _serve_with_ranks(self, pool: RankPool, resolved: ResolvedModel, shape: ModelShape) -> NoReturn:
        """Assembles the ranks, serves until one is lost, and begins again. Raises EngineDead when that is too often."""
        config, state = self._config, self._state
        executor = RemoteExecutor(pool)
        epochs = itertools.chain([self._epoch], iter(lambda: _draw_epoch(self._run_dir), 0))
        # Nobody starts a lost rank of a job again but the job.
        is_job = config.executor == "external"
        budget = RestartBudget(0 if is_job else config.restart_budget)
        core: Core | None = None
        is_rebuild = bool(self._sizes())  # a core before this one has served
        # At the first start there may be no room for a rank yet, and whoever waits for it sees that.
        deadline = time.monotonic() + config.rebuild_seconds if is_rebuild else float("inf")
        while True:
            sizes = self._sizes()
            pool.sizes = Welcomed(sizes.get("num_kv_blocks"), sizes.get("max_model_len"))
            try:
                epoch, loaded = assemble(
                    pool,
                    epochs.__next__,
                    pool.sizes.num_kv_blocks,
                    deadline,
                    budget,
                    state.begin_phase,
                    is_rebuild=is_rebuild,
                )
            except RankLost as unmended:
                if is_job:
                    raise EngineDead(f"{unmended}; start the job again") from unmended
                limits = f"{config.rebuild_seconds:g} s and {config.restart_budget} restarts"
                raise EngineDead(
                    f"{unmended}; not mended within {limits}{pool.memory_kills.told(time.monotonic())}"
                ) from unmended
            if core is None:
                num_blocks = pool.sizes.num_kv_blocks or min(rank.num_blocks for rank in loaded)
                model = _model_status(resolved, shape, loaded, sizes.get("max_model_len"))
                engine_sizes = EngineSizes(
                    num_blocks=num_blocks,
                    max_model_len=model.max_model_len,
                    num_step_tokens=loaded[0].num_step_tokens,
                )
                engine = engine_on(config, executor, shape, engine_sizes, epoch)
                self._keep_sizes(engine, model)
                core = Core(engine, model, self._io, state, self._box, executor.check)
            engine.scheduler.epoch = state.epoch = epoch
            explanation = min(loaded, key=lambda rank: rank.num_blocks).kv_explanation
            began = self._prepare_to_begin(model, explanation, is_restart=is_rebuild)
            is_rebuild = True
            try:
                core.run(self._inbox, began)
            except RankLost as first_loss:
                lost_at = time.monotonic()
                nodes = {number: rank.greeting.node for number, rank in pool.attached.items()}
                loss = let_go(pool, first_loss)
                logger.warning("%s", loss)
                state.recovering(loss.rank, nodes.get(loss.rank, ""), str(loss), lost_at)
                self._io.flush_status()
                engine.scheduler.forget_ranks()
                deadline = time.monotonic() + config.rebuild_seconds
                # A death in a trial leaves fewer suspects: they cannot go on for ever, and are no reason to give up.
                # Others are only booked: the ranks were up, so nothing has to be waited for. A job ends at the first.
                is_narrower = self._box.died(was_silent=loss.is_silent)
                if (is_job or not is_narrower) and budget.wait_after_death(time.monotonic()) is None:
                    spent = "start the job again" if is_job else f"restart budget of {config.restart_budget} spent"
                    raise EngineDead(f"{loss}; {spent}{pool.memory_kills.told(time.monotonic())}") from loss

    def _prepare_to_begin(self, model: ModelStatus, message: str, *, is_restart: bool) -> Callable[[], None]:
        """What is to be called when a step has passed every rank: only that shows that tokens flow again."""
        self._state.model = model
        if is_restart:
            self._state.begin_phase("replay", 0, 0, "")
        return partial(self._begin, message)

    def _begin(self, message: str) -> None:
        state = self._state
        is_first = state.state == "starting"
        state.serving(message)
        forget_failure(self._run_dir)
        if is_first:
            # What is alive now stays alive: the collector need not walk it again in the middle of a step.
            gc.collect()
            gc.freeze()
        self._io.flush_status()
        phases = ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in state.phases)
        logger.info("serving, epoch %d, start-up %s", state.epoch, phases)

    def _sizes(self) -> dict[str, int]:
        """num_kv_blocks and max_model_len of the first core; nothing when this is it.

        A core that found less free memory than the one before it could not go on with what that one accepted.
        """
        path = self._run_dir / "sizing.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _keep_sizes(self, engine: Engine, model: ModelStatus) -> None:
        sizes = {"num_kv_blocks": engine.scheduler.config.num_blocks, "max_model_len": model.max_model_len}
        _write_whole(self._run_dir / "sizing.json", json.dumps(sizes))


def _model_status(
    resolved: ResolvedModel, shape: ModelShape, loaded: list[Loaded], max_model_len: int | None
) -> ModelStatus:
    return ModelStatus(
        path=str(resolved.path),
        architecture=shape.architecture,
        num_parameters=shape.num_parameters,
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len or min(rank.max_model_len for rank in loaded),
        eos_token_ids=shape.eos_token_ids,
        dtype=loaded[0].dtype,
        compute_dtype=loaded[0].compute_dtype,
        weight_bytes=sum(rank.weight_bytes for rank in loaded),
        commit=resolved.commit,
    )


def _draw_epoch(run_dir: Path) -> int:
    """A number that no epoch of this server had before."""
    path = run_dir / "epoch"
    epoch = int(path.read_text()) + 1 if path.exists() else 1
    _write_whole(path, str(epoch))
    return epoch


def _write_whole(path: Path, text: str) -> None:
    """Whole or not at all: a core that is killed here must not leave half a file to the next one."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rayloom_engine.core_server.process", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with config.json and token")
    parser.add_argument("--core-address", required=True, help="unix:PATH or tcp:HOST:PORT to listen on")
    parser.add_argument("--rank-fd", type=int, help="listening socket for ranks; left out: this process is the rank")
    parser.add_argument("--parent", type=int, required=True, help="process id to end with")
    parser.add_argument("--pulse-fd", type=int, help="pipe to the supervisor, for signs of life")
    args = parser.parse_args()
    end_with_parent(args.parent)
    config = load_config(args.run_dir / "config.json")
    set_up_logging("core", config.log_level)
    core = CoreProcess(config, args.run_dir, args.core_address, args.rank_fd)
    start_pulse(args.pulse_fd, core.is_up)
    return core.run()


if __name__ == "__main__":
    sys.exit(main())
