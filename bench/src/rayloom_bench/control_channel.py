"""`rayloom-engine bench channel`: round trips of a step to a rank, by our channel and as calls of a Ray actor."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rayloom_bench import channel_peer
from rayloom_bench.figures import percentile
from rayloom_bench.machine import busy_percent, processor_name
from rayloom_bench.report import DISTURBED_PERCENT
from rayloom_engine.core.step import SlotStep, StepPlan
from rayloom_engine.protocol.channel import encode, welcome
from rayloom_engine.protocol.ranks import Computed, Run, Welcomed

NUM_SLOTS = 16
GOALS = {"shared memory": 0.2, "TCP": 0.5}  # goals: the largest allowed medians, as fractions of a Ray call's median
RAY = "Ray actor call"
_BLOCK = 50  # round trips of one kind before the next kind's turn; few, so that a busy moment slows all kinds
_START_SECONDS = 30.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # bytes; Ray's minimum

RoundTrip = Callable[[Run], Computed]


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 1 if a peer was lost, else 0. The table shows missed goals."""
    busy = busy_percent()
    try:
        seconds = measure(args.round_trips)
    except OSError as error:
        print(f"rayloom-engine bench channel: a peer was lost ({error})", file=sys.stderr)
        return 1
    warning = " (DISTURBED: do not quote these figures)" if busy > DISTURBED_PERCENT else ""
    print(f"{processor_name()}, {busy:.0f} % busy before the run{warning}", table(seconds), sep="\n\n")
    if args.json is not None:
        figures = {kind: [1e6 * percentile(values, share) for share in (0.5, 0.99)] for kind, values in seconds.items()}
        args.json.write_text(json.dumps({"microseconds_p50_p99": figures}, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(num_round_trips: int) -> dict[str, list[float]]:
    """Kind of channel -> seconds of each of its round trips, with encoding and decoding on both sides."""
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        kinds: dict[str, RoundTrip] = {
            "shared memory": stack.enter_context(_channel("steps")),
            "TCP": stack.enter_context(_channel("control")),
            RAY: stack.enter_context(_actor()),
        }
        for kind, round_trip in kinds.items():
            seconds[kind] = []
            for ticket in range(_BLOCK):
                round_trip(_plan(ticket))  # one round trip as a warm-up
        for first in range(0, num_round_trips, _BLOCK):
            for kind, round_trip in kinds.items():
                for ticket in range(first, min(first + _BLOCK, num_round_trips)):
                    order = _plan(ticket)
                    began = time.perf_counter()
                    reply = round_trip(order)
                    seconds[kind].append(time.perf_counter() - began)
                    assert reply.ticket == ticket and len(reply.result.sampled) == NUM_SLOTS
    return seconds


def table(seconds: Mapping[str, list[float]]) -> str:
    """Median and 99th percentile of each kind in microseconds, the ratio to Ray's median, and the goal."""
    order = _plan(0)
    ray = percentile(seconds[RAY], 0.5)
    lines = [
        f"A plan of {NUM_SLOTS} decoding slots ({len(encode(order))} bytes) to a rank, its result "
        f"({len(encode(channel_peer.answer(order)))} bytes) back; {len(seconds[RAY])} times each, in microseconds",
        "",
        f"{'':16}{'p50':>8}{'p99':>8}{'of Ray':>9}   goal",
    ]
    for kind, values in seconds.items():
        median = percentile(values, 0.5)
        line = f"{kind:16}{1e6 * median:8.1f}{1e6 * percentile(values, 0.99):8.1f}{median / ray:9.3f}"
        if kind in GOALS:
            line += f"   <= {GOALS[kind]} {'met' if median <= GOALS[kind] * ray else 'MISSED'}"
        lines.append(line)
    return "\n".join(lines)


def _plan(ticket: int) -> Run:
    """A decode step of all slots. Each slot appends one token; one slot in NUM_SLOTS gets a new block."""
    slots = tuple(
        SlotStep(
            slot=slot,
            start=700 + ticket,
            num_tokens=1,
            new_token_ids=(20_000 + slot,),
            new_block_ids=(300 + slot,) if (ticket + slot) % NUM_SLOTS == 0 else (),
            samples=True,
        )
        for slot in range(NUM_SLOTS)
    )
    return Run(ticket, StepPlan(step_id=ticket, epoch=1, slots=slots))


@contextlib.contextmanager
def _channel(role: str) -> Iterator[RoundTrip]:
    token = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_START_SECONDS)
        host, port = listener.getsockname()
        peer = subprocess.Popen(
            [sys.executable, "-m", channel_peer.__name__, f"{host}:{port}", role],
            env=os.environ | {channel_peer.TOKEN_VARIABLE: token},
        )
        try:
            channel, greeting = welcome(listener.accept()[0], token)
            if greeting.role == "steps":
                channel.offer_memory()
                if channel.transport == "TCP":
                    raise OSError("memory could not be shared with it")
            channel.send(Welcomed())

            def round_trip(order: Run) -> Computed:
                channel.send(order)
                return channel.expect(Computed, _START_SECONDS)

            yield round_trip
            channel.close()
        finally:
            peer.kill()
            peer.wait()


@contextlib.contextmanager
def _actor() -> Iterator[RoundTrip]:
    """A Ray actor that receives and returns encoded messages. Ray would pickle objects, which takes longer."""
    import ray

    class Rank:
        def run(self, data: bytes) -> bytes:
            return encode(channel_peer.answer(msgspec.msgpack.decode(data[4:], type=Run)))

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        configure_logging=False,
    )
    try:
        actor: Any = ray.remote(num_cpus=1)(Rank).remote()

        def round_trip(order: Run) -> Computed:
            data: Any = ray.get(actor.run.remote(encode(order)))
            return msgspec.msgpack.decode(data[4:], type=Computed)

        yield round_trip
    finally:
        ray.shutdown()


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("--round-trips", type=_positive, default=2000, help="round trips of each kind (default 2000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} given, it must be 1 or more")
    return int(text)
