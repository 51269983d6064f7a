"""An engine without a model, for gateways. Each sequence gets its first token at once, and another one in every step.

Its sockets are those of a real core. As in a real engine, the tokens of a step leave in one message for each gateway.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from rayloom_bench.gateway.text import END, FIRST_WORD_ID, VOCAB_SIZE, WORDS
from rayloom_engine.core.load import SchedulerLoad
from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.core_server.sockets import CoreIo, Disconnected, GatewayPort, Inbox, InboxMessage
from rayloom_engine.protocol.fingerprint import Fingerprint
from rayloom_engine.protocol.messages import (
    Abort,
    CacheChanges,
    CoreStatus,
    LoadReport,
    Outputs,
    SequenceOutput,
    ServedModel,
    Submit,
    WantCache,
)
from rayloom_engine.protocol.text_files import TOKENIZER, text_files

MAX_MODEL_LEN = 1_000_000
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence, and the number of its tokens so far."""

    submit: Submit
    num_tokens: int = 0

    def next(self) -> tuple[SequenceOutput, Running | None]:
        """Returns the next output, and the sequence's state after it; None as state if the sequence is finished."""
        is_last = self.num_tokens + 1 >= self.submit.params.max_tokens
        output = SequenceOutput(
            sequence_id=self.submit.sequence_id,
            token_ids=(FIRST_WORD_ID + self.num_tokens % len(WORDS),),
            finish_reason="length" if is_last else None,
            attempt=self.submit.attempt,
        )
        return output, None if is_last else replace(self, num_tokens=self.num_tokens + 1)


class Generator:
    """All running sequences, by connection and sequence id."""

    def __init__(self, io: CoreIo) -> None:
        self._io = io
        self._running: dict[tuple[int, str], Running] = {}

    def receive(self, connection: int, message: InboxMessage) -> None:
        """Handles one message of a gateway. A new sequence gets its first token."""
        match message:
            case Submit():
                self._send(connection, {message.sequence_id: Running(message, len(message.generated_ids))})
            case Abort():
                self._running.pop((connection, message.sequence_id), None)
            case WantCache():
                self._io.send(connection, CacheChanges(start=1, number=0, block_size=BLOCK_SIZE, num_parts=1))
                self._io.send(connection, LoadReport(SchedulerLoad()))
            case Disconnected():
                self._running = {place: each for place, each in self._running.items() if place[0] != connection}

    def step(self) -> None:
        """Sends every sequence its next token."""
        by_connection: dict[int, dict[str, Running]] = {}
        for (connection, sequence_id), running in self._running.items():
            by_connection.setdefault(connection, {})[sequence_id] = running
        for connection, sequences in by_connection.items():
            self._send(connection, sequences)

    def _send(self, connection: int, sequences: dict[str, Running]) -> None:
        outputs = []
        for sequence_id, running in sequences.items():
            output, following = running.next()
            outputs.append(output)
            if following is None:
                self._running.pop((connection, sequence_id), None)
            else:
                self._running[connection, sequence_id] = following
        self._io.send(connection, Outputs(tuple(outputs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--key", required=True, help="key of the gateways")
    parser.add_argument("--port", type=int, required=True, help="port for gateways")
    parser.add_argument("--rate", type=float, required=True, help="steps in a second")
    args = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    model = served_model(args.folder)
    inbox = Inbox(deque(), threading.Event())
    with tempfile.TemporaryDirectory(prefix="rayloom-bench-") as folder:
        listener = socket.create_server(("127.0.0.1", args.port))
        io = CoreIo(
            f"unix:{folder}/core.sock",
            args.key,
            inbox,
            lambda: _status(model),
            gateways=GatewayPort(listener, args.key),
        )
        io.start()
        _run(Generator(io), inbox, args.rate)


def served_model(folder: Path) -> ServedModel:
    """The description of the model that the engine claims to serve."""
    files = text_files(folder)
    fingerprint = Fingerprint(
        architecture="LlamaForCausalLM",
        commit=None,
        content_hash="words",
        tokenizer_hash=next(file.sha256 for file in files if file.name == TOKENIZER),
        dtype="bfloat16",
        compute_dtype="bfloat16",
        quantization="none",
        arithmetic="none",
        tensor_parallel_size=1,
        engine_version="bench",
        max_model_len=MAX_MODEL_LEN,
    )
    return ServedModel(
        path=str(folder),
        architecture="LlamaForCausalLM",
        num_parameters=1,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(END,),
        dtype="bfloat16",
        compute_dtype="bfloat16",
        weight_bytes=2,
        fingerprint=fingerprint,
        text_files=files,
    )


def _status(model: ServedModel) -> CoreStatus:
    return CoreStatus(
        state="serving",
        epoch=1,
        executor="uni",
        step=1,
        last_token_age_s=0.0,
        phases=(),
        stats=SchedulerStats(),
        ranks=(),
        model_folder=model.path,
        model=model,
    )


def _run(generator: Generator, inbox: Inbox, rate: float) -> None:
    """Runs steps until the parent process ends. Steps that become due during a late step are skipped."""
    parent = os.getppid()
    due_s = time.monotonic()
    while os.getppid() == parent:
        inbox.wait(max(0.0, due_s - time.monotonic()), 1.0)
        for connection, message in inbox.take():
            generator.receive(connection, message)
        now_s = time.monotonic()
        if now_s >= due_s:
            generator.step()
            due_s = max(due_s + 1 / rate, now_s)


if __name__ == "__main__":
    main()
