"""Runs one rank of a job (executor external), whose processes an external launcher such as torchrun has started."""

from __future__ import annotations

import logging
import os
import signal
import time

from rayloom_engine.common.process import EXIT_CONFIG, EXIT_RANK_LOST
from rayloom_engine.config import EngineConfig
from rayloom_engine.executor_choice import job_place
from rayloom_engine.worker.device_shares import rank_devices
from rayloom_engine.worker.machine import visible_devices
from rayloom_engine.worker.rank_server import DIAL_SECONDS, RankPlace, RankServer

logger = logging.getLogger(__name__)


def serve_in_job(config: EngineConfig) -> int:
    """Runs this process as a rank of its job until the core is gone. Returns the exit code. Raises ConfigError.

    SIGTERM, SIGINT and SIGHUP reach every process of a job. The core still needs its ranks while the engine drains. So
    a rank only notes the signal, and exits with code 0 once the core is gone.
    """
    place = job_place(config, os.environ)
    devices = [] if config.device == "cpu" else visible_devices()
    devices = rank_devices(
        config, devices, place.ranks_on_host, subject="executor: 'external'", remedy="start fewer on this machine"
    )
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[place.local_rank]
    signals = note_stop_signals()
    rank_place = RankPlace(
        rank=place.rank,
        incarnation=1,
        ranks_on_host=place.ranks_on_host,
        address=place.address,
        token=place.token,
    )
    server = RankServer(config, rank_place, lambda: 0 if signals else _job_code(server))
    deadline = time.monotonic() + config.rebuild_seconds
    while not signals and not server.serve_core():
        if time.monotonic() > deadline:
            logger.error("no core at %s for %.0f s", place.address, config.rebuild_seconds)
            break
        time.sleep(DIAL_SECONDS)
    server.remove_host_memory()
    if signals:
        return 0
    logger.error("the core of rank %d is gone%s", place.rank, "" if server.is_refused else "; start the job again")
    return _job_code(server)


def note_stop_signals() -> list[int]:
    """Makes stop signals append their numbers to the result, and do nothing else. Under nohup, SIGHUP stays ignored."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: signals.append(received))
    return signals


def _job_code(server: RankServer) -> int:
    return EXIT_CONFIG if server.is_refused else EXIT_RANK_LOST
