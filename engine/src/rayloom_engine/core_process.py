"""The core's process: `python -m rayloom_engine.core_process`. Engine in the main thread, sockets in a second one.

The main thread only computes; the I/O thread answers fronts at once, also while a step or the loading takes seconds.
They meet in two places: the inbox (front messages, in order) and CoreState (attributes that the main thread writes).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rayloom_engine.build import build_found_engine
from rayloom_engine.config import EngineConfig, load_config
from rayloom_engine.core.sequence import Sequence, SequenceOutput
from rayloom_engine.core_io import CoreIo, Disconnected, Inbox
from rayloom_engine.engine import Engine
from rayloom_engine.errors import ConfigError, ModelError, QueueFull, RequestError
from rayloom_engine.process import EXIT_CONFIG, end_with_parent, set_up_logging
from rayloom_engine.protocol.messages import (
    Abort,
    CoreStatus,
    ModelStatus,
    Output,
    Outputs,
    PhaseStatus,
    RankStatus,
    Refused,
    SchedulerStats,
    Submit,
)
from rayloom_engine.sampling_params import check_token_ids
from rayloom_engine.worker.start import find_model

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 10.0  # an idle engine proves itself this often


@dataclass(slots=True)
class CoreState:
    """What the core knows of itself. Written by the main thread, read by the I/O thread; each field at once."""

    epoch: int
    state: str = "starting"
    message: str = ""
    model: ModelStatus | None = None
    phases: list[PhaseStatus] = field(default_factory=list)
    phase_started: float = 0.0
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    rank_phase: str = "start"
    heartbeat: float = field(default_factory=time.monotonic)
    last_token_at: float | None = None

    def begin_phase(self, phase: str, done: int, total: int, unit: str) -> None:
        """Progress of a start-up phase; a new name ends the one before."""
        now = time.monotonic()
        self.heartbeat = now
        if not self.phases or self.phases[-1].name != phase:
            self.end_phase()
            self.phase_started = now
            self.phases = [*self.phases, PhaseStatus(name=phase, seconds=0.0, done=done, total=total, unit=unit)]
        else:
            current = PhaseStatus(name=phase, seconds=now - self.phase_started, done=done, total=total, unit=unit)
            self.phases = [*self.phases[:-1], current]

    def end_phase(self) -> None:
        if self.phases and not self.phases[-1].is_finished:
            last = self.phases[-1]
            ended = PhaseStatus(
                name=last.name,
                seconds=time.monotonic() - self.phase_started,
                done=last.total,
                total=last.total,
                unit=last.unit,
                is_finished=True,
            )
            self.phases = [*self.phases[:-1], ended]

    def status(self) -> CoreStatus:
        now = time.monotonic()
        last = self.last_token_at
        return CoreStatus(
            state=self.state,
            epoch=self.epoch,
            step=self.stats.num_steps,
            last_token_age_s=None if last is None else now - last,
            phases=tuple(self.phases),
            stats=self.stats,
            ranks=(
                RankStatus(
                    rank=0,
                    node=platform.node(),
                    pid=os.getpid(),
                    phase=self.rank_phase,
                    heartbeat_age_s=now - self.heartbeat,
                    step=self.stats.num_steps,
                    memory_bytes=psutil.Process().memory_info().rss,
                ),
            ),
            model=self.model,
            message=self.message,
        )


class Core:
    """Turns front messages into sequences and step outputs into front messages."""

    def __init__(self, engine: Engine, model: ModelStatus, io: CoreIo, state: CoreState) -> None:
        self._engine = engine
        self._model = model
        self._io = io
        self._state = state

    def run(self, inbox: Inbox) -> None:
        """Serves for ever."""
        idle_since = time.monotonic()
        while True:
            for connection, message in inbox.take():
                self._handle(connection, message)
            self._state.heartbeat = time.monotonic()
            if self._engine.has_unfinished:
                self._state.rank_phase = "step"
                self._send(self._engine.step())
                self._publish()
                idle_since = time.monotonic()
                continue
            self._state.rank_phase = "idle"
            self._publish()
            has_mail = inbox.wait(max(0.0, idle_since + _PROBE_SECONDS - time.monotonic()), at_most=1.0)
            if not has_mail and time.monotonic() - idle_since >= _PROBE_SECONDS:
                self._engine.add_probe()

    def _handle(self, connection: int, message: Submit | Abort | Disconnected) -> None:
        if isinstance(message, Submit):
            self._submit(connection, message)
        elif isinstance(message, Abort):
            self._engine.abort(_request_id(connection, message.sequence_id))
        else:
            prefix = _request_id(connection, "")
            for sequence in list(self._engine.scheduler.unfinished()):
                if sequence.request_id.startswith(prefix):
                    self._engine.abort(sequence.request_id)

    def _submit(self, connection: int, submit: Submit) -> None:
        sequence = Sequence(
            request_id=_request_id(connection, submit.sequence_id),
            prompt_ids=submit.prompt_ids,
            generated_ids=submit.generated_ids,
            params=submit.params,
            eos_token_ids=self._model.eos_token_ids,
            priority=submit.priority,
            arrival=submit.arrival,
            fork_of=None if submit.fork_of is None else _request_id(connection, submit.fork_of),
        )
        try:
            check_token_ids(sequence.token_ids, self._model.vocab_size)
            output = self._engine.add(sequence, submit.is_resume)
        except QueueFull as error:
            refused = Refused(
                sequence_id=submit.sequence_id,
                reason="queue_full",
                message=str(error),
                retry_after_s=error.retry_after_s,
            )
            self._io.send(connection, refused)
        except RequestError as error:
            is_too_long = sequence.num_tokens >= self._engine.scheduler.config.max_model_len
            reason = "too_long" if is_too_long else "invalid"
            self._io.send(connection, Refused(sequence_id=submit.sequence_id, reason=reason, message=str(error)))
        else:
            if output is not None:
                self._send([output])

    def _send(self, outputs: list[SequenceOutput]) -> None:
        by_connection: dict[int, list[Output]] = {}
        for output in outputs:
            connection, _, sequence_id = output.request_id.partition("/")
            by_connection.setdefault(int(connection), []).append(
                Output(
                    sequence_id=sequence_id,
                    token_ids=output.token_ids,
                    logprobs=output.logprobs,
                    prompt_logprobs=output.prompt_logprobs,
                    finish_reason=output.finish_reason,
                    stop_token_id=output.stop_token_id,
                    num_cached_tokens=output.num_cached_tokens,
                )
            )
        for number, items in by_connection.items():
            self._io.send(number, Outputs(tuple(items)))

    def _publish(self) -> None:
        self._state.stats = self._engine.stats()
        self._state.last_token_at = self._engine.last_token_at
        self._state.heartbeat = time.monotonic()


def _request_id(connection: int, sequence_id: str) -> str:
    """Ids are unique per front, and two connections may be from two fronts."""
    return f"{connection}/{sequence_id}"


def serve(config: EngineConfig, address: str, token: str, epoch: int, sizing_file: Path) -> int:
    """Runs the core; returns an exit code only when it cannot start.

    The first core writes its sizes to `sizing_file` and later ones take them: a core that found less free memory than
    the one before it could not go on with what that one accepted.
    """
    state = CoreState(epoch=epoch)
    inbox = Inbox(deque(), threading.Event())
    io = CoreIo(address, token, epoch, inbox, state.status)
    io.start()
    try:
        resolved, shape = find_model(config, state.begin_phase)
        if sizing_file.exists():
            config = config.model_copy(update=json.loads(sizing_file.read_text()))
        built = build_found_engine(config, resolved, shape, epoch, state.begin_phase)
    except (ModelError, ConfigError) as error:
        logger.error("%s", error)
        state.end_phase()
        state.message = str(error)
        state.state = "failed"
        io.flush_status()
        return EXIT_CONFIG
    model = built.model
    sizes = {"num_kv_blocks": built.engine.scheduler.config.num_blocks, "max_model_len": model.max_model_len}
    # Whole or not at all: a core that is killed here must not leave half a file to the next one.
    draft = sizing_file.with_suffix(".new")
    draft.write_text(json.dumps(sizes))
    draft.replace(sizing_file)
    state.end_phase()
    state.model = model
    state.message = built.kv_explanation
    state.state = "serving"
    state.rank_phase = "idle"
    # What is alive now stays alive: the collector need not walk it again in the middle of a step.
    gc.collect()
    gc.freeze()
    io.flush_status()
    how = "set" if config.executor == "uni" else "one rank"
    logger.info("executor uni (%s)", how)
    logger.info("serving, epoch %d, start-up %s", epoch, _phase_line(state.phases))
    Core(built.engine, built.model, io, state).run(inbox)
    return 0


def _phase_line(phases: list[PhaseStatus]) -> str:
    return ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in phases)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rayloom_engine.core_process", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with config.json and token")
    parser.add_argument("--core-address", required=True, help="unix:PATH or tcp:HOST:PORT to listen on")
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id to end with")
    args = parser.parse_args()
    end_with_parent(args.parent)
    config = load_config(args.run_dir / "config.json")
    set_up_logging("core", config.log_level)
    token = (args.run_dir / "token").read_text().strip()
    return serve(config, args.core_address, token, args.epoch, args.run_dir / "sizing.json")


if __name__ == "__main__":
    sys.exit(main())
