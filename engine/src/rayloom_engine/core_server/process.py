"""The EngineCore process ("core"), `python -m rayloom_engine.core_server.process`: an engine and its sockets.

The main thread schedules, computes and sends outputs. The I/O thread answers API server processes ("fronts") at once,
even while a step or the loading of weights takes seconds. The threads share the inbox (messages from fronts, in order),
CoreState (attributes that the main thread writes) and the sockets of the fronts.
"""

from __future__ import annotations

import sys

from rayloom_engine.common.late_arguments import late_arguments, sender_of
from rayloom_engine.common.process import (
    EXIT_AGAIN,
    EXIT_CONFIG,
    EXIT_GIVEN_UP,
    PULSE_SECONDS,
    die_with_parent,
    end_with_parent,
    set_up_logging,
    start_pulse,
    thread_cpu_clock,
    write_failure,
)

if __name__ == "__main__" and (sender := sender_of(sys.argv[1:])) is not None:
    die_with_parent(sender)  # called before the other imports: they take a second, in which the sender may be killed

import argparse
import faulthandler
import logging
import os
import socket
import threading
from collections import deque
from pathlib import Path
from typing import NoReturn

from rayloom_engine.build import FoundModel, build_found_engine
from rayloom_engine.config import EngineConfig, load_config
from rayloom_engine.core_server.black_box import BlackBox
from rayloom_engine.core_server.context import CoreContext
from rayloom_engine.core_server.front_handshake import PortTls
from rayloom_engine.core_server.host_index import begin_host_epoch
from rayloom_engine.core_server.loop import Core
from rayloom_engine.core_server.ranks.pool import RankPool
from rayloom_engine.core_server.ranks.stillness import Stillness
from rayloom_engine.core_server.recovery import RecoveryMachine
from rayloom_engine.core_server.run_folder import KeptSizes, RunFolder
from rayloom_engine.core_server.sockets import CoreIo, GatewayPort, Inbox
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.errors import ConfigError, CorruptRank, EngineDead, ModelError
from rayloom_engine.protocol.front_key import load_front_key
from rayloom_engine.protocol.ranks import Welcomed
from rayloom_engine.protocol.tls.files import TlsFiles
from rayloom_engine.worker.host_memory import HostMemoryPlace
from rayloom_engine.worker.start import find_model

logger = logging.getLogger(__name__)

_CORRUPT_CURE = "check the model's files and the machine's memory; float16 may overflow: use bfloat16 or float32"


class CoreProcess:
    """One start of the EngineCore process. Epoch, black box and sizes outlive it in the run folder."""

    def __init__(
        self,
        config: EngineConfig,
        run_dir: Path,
        address: str,
        rank_fd: int | None,
        gateways: GatewayPort | None = None,
    ) -> None:
        """`rank_fd`: listening socket for ranks; None: this process is the only rank."""
        self._config = config
        self._folder = RunFolder(run_dir)
        self._token = self._folder.token()
        self._rank_fd = rank_fd
        self._epoch = self._folder.draw_epoch()
        self._box = BlackBox(run_dir)
        self._state = CoreState(epoch=self._epoch, executor=config.executor, hang_seconds=config.hang_seconds)
        self._state.takes_adapters = config.takes_adapters
        self._state.set_patience(config.hang_seconds)
        self._state.set_draining(self._folder.is_draining())
        self._inbox = Inbox(deque(), threading.Event())
        self._io = CoreIo(
            address,
            self._token,
            self._inbox,
            self._state.status,
            gateways=gateways,
            on_front_report=self._state.record_front_report,
        )
        self._stillness = Stillness()  # watches the main thread
        self._main_cpu_clock = thread_cpu_clock()
        self._num_pulses = 0

    def run(self) -> int:
        """Serves until the process ends. Returns an exit code only if the engine cannot start or cannot continue."""
        self._io.start()
        kept = self._folder.sizes()
        pool = None
        if self._rank_fd is not None:
            # Connections are accepted before all work that takes long, because ranks that start early must find an
            # EngineCore.
            listener = socket.socket(fileno=self._rank_fd)
            # A rank that is replaced while this process still looks for the model must get the first core's sizes, too.
            welcomed = kept.welcomed() if kept is not None else Welcomed()
            pool = RankPool(listener, self._token, self._config.world_size, self._config.hang_seconds, welcomed)
            self._state.pool = pool
        try:
            commit = None if kept is None else kept.commit
            found = find_model(self._config, self._state.begin_phase, has_weights=pool is None, commit=commit)
            model = FoundModel(*found)
            self._state.model_folder = str(model.resolved.path)  # fronts read the tokenizer while the ranks load
            if pool is None:
                self._serve_alone(model, kept)
            else:
                RecoveryMachine(self._context(), pool, model, self._epoch).run()
        except (ModelError, ConfigError) as error:
            if self._folder.sizes() is None:
                return self._fail(error, EXIT_CONFIG)
            # The model has been loaded with these settings before, so the cause may pass: a disk or hub that does not
            # answer, or too little memory. This death counts in the supervisor's restart budget.
            logger.error("%s; the core ends", error)
            write_failure(self._folder.path, str(error))
            return EXIT_AGAIN
        except EngineDead as error:
            return self._fail(error, EXIT_GIVEN_UP)
        except CorruptRank as error:
            # The next EngineCore process loads the weights again. This death counts in the supervisor's restart budget.
            logger.error("%s; the core ends", error)
            if self._state.rank is not None and self._state.rank.host is not None:
                self._state.rank.host.file.remove()  # the damaged rank may have written wrong copies
            write_failure(self._folder.path, f"{error}; {_CORRUPT_CURE}")
            os._exit(1)

    def is_up(self) -> bool:
        """Returns True if the start is complete. Called for every pulse; exits the process if the main thread hangs."""
        state = self._state
        # The main thread is watched while the state is "serving". If this process is the only rank, the main thread is
        # watched as soon as the rank has loaded: the first step comes before "serving".
        mark = state.mark() if state.state == "serving" or state.rank is not None else None
        # Time is counted in pulses. A clock would also count the time in which this process was stopped.
        self._num_pulses += 1
        self._stillness.observe(self._num_pulses * PULSE_SECONDS, mark, self._main_cpu_clock())
        state.quiet_s = self._stillness.quiet_s
        # With rank processes, the patience is doubled. If a rank does not read its full socket, the main thread may be
        # blocked for hang_seconds, before it blames this rank.
        patience = state.patience_s * (1 if state.pool is None else 2)
        if self._stillness.is_hung(patience):
            logger.error("the main thread stands still for %g s; the core ends", self._stillness.still_s)
            faulthandler.dump_traceback()
            os._exit(1)
        # A core that has failed is about to end. If it counted as up, the supervisor would restart it in spite of exit
        # code 78.
        return state.state not in ("starting", "failed")

    def _context(self) -> CoreContext:
        return CoreContext(
            config=self._config,
            folder=self._folder,
            io=self._io,
            inbox=self._inbox,
            state=self._state,
            box=self._box,
        )

    def _fail(self, error: Exception, code: int) -> int:
        logger.error("%s", error)
        write_failure(self._folder.path, str(error))
        self._state.failed(str(error))
        self._io.flush_status()
        return code

    def _serve_alone(self, model: FoundModel, kept: KeptSizes | None) -> NoReturn:
        """Serves until the process ends, with this process as the only rank."""
        context = self._context()
        fixed = {} if kept is None else {"num_kv_blocks": kept.num_kv_blocks, "max_model_len": kept.max_model_len}
        config = self._config.model_copy(update=fixed)
        host = HostMemoryPlace(token=self._token, is_required=kept is None)
        built = build_found_engine(config, model, self._epoch, self._state.begin_phase, host)
        if built.rank.host is not None:
            begin_host_epoch(built.engine.scheduler.pool.tier, (built.rank.host.file.id,), self._token)
        if kept is None:
            sizes = KeptSizes(
                num_kv_blocks=built.engine.scheduler.config.num_blocks,
                max_model_len=built.model.max_model_len,
                commit=model.resolved.commit,
            )
            self._folder.keep_sizes(sizes)
        self._state.rank = built.rank
        began = context.prepare_to_serve(built.model, built.kv_explanation, is_restart=kept is not None)
        Core(built.engine, built.model, self._io, self._state, self._box).run(self._inbox, began)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rayloom_engine.core_server.process", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with config.json and token")
    parser.add_argument("--core-address", required=True, help="unix:PATH to listen on")
    parser.add_argument("--rank-fd", type=int, help="listening socket for ranks; if missing, this is the only rank")
    parser.add_argument("--front-fd", type=int, help="listening socket for gateways; if missing, there is no such port")
    parser.add_argument("--parent", type=int, required=True, help="id of the process with which this one ends")
    parser.add_argument("--pulse-fd", type=int, help="pipe to the supervisor, for signs of life")
    args = parser.parse_args(late_arguments(sys.argv[1:]))
    end_with_parent(args.parent)
    config = load_config(args.run_dir / "config.json")
    set_up_logging("core", config.log_level)
    try:
        gateways = gateway_port(args.front_fd, config)
    except ConfigError as error:
        logger.error("%s", error)
        write_failure(args.run_dir, str(error))
        # A restarted core may read the files while they are renewed.
        return EXIT_CONFIG if RunFolder(args.run_dir).sizes() is None else EXIT_AGAIN
    core = CoreProcess(config, args.run_dir, args.core_address, args.rank_fd, gateways)
    start_pulse(args.pulse_fd, core.is_up)
    return core.run()


def gateway_port(front_fd: int | None, config: EngineConfig) -> GatewayPort | None:
    """Returns the port for gateways, with its key; None if there is no such port. Raises ConfigError."""
    if front_fd is None or config.front_key_file is None:
        return None
    key = load_front_key(config.front_key_file, "front_key_file")
    paths = config.front_tls_paths
    tls = None
    if paths is not None:
        tls = PortTls(TlsFiles(paths, is_server=True), is_strict=config.front_tls_mode == "strict")
    return GatewayPort(socket.socket(fileno=front_fd), key, tls)


if __name__ == "__main__":
    sys.exit(main())
