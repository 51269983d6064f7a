"""`make chaos`: random faults under load against real servers. The exit code is 1 when a request failed.

Each fault happens while streams run, and then new requests arrive. rt_streams.py has the rules for failed requests.
Every token is compared with a run without faults. The front is never killed, because its end cuts all connections of
clients.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rt_faults import breakable_server, strike
from rt_streams import NUM_TOKENS, disturb, undisturbed

NUM_STAGES = 2
NUM_SHARDS = 3  # the built-in model has 3 key/value heads
KINDS = [
    ("rank", "killed"),
    ("rank", "stopped"),
    ("rank", "stuck"),
    ("core", "killed"),
    ("core", "stopped"),
    ("launcher", "killed"),
]
ARGUMENTS = (
    "--dtype",
    "float32",
    "--served-model-name",
    "m",
    "--max-model-len",
    "1024",
    "--num-kv-blocks",
    "512",
    "--hang-seconds",
    "4",
    "--restart-budget",
    "1000",
)
STAGES = ("--pipeline-parallel-size", str(NUM_STAGES))
SHARDS = ("--tensor-parallel-size", str(NUM_SHARDS))
ONE_RANK = ("--async-scheduling",)


@dataclass(frozen=True)
class Fault:
    role: str  # rank, core or launcher
    victim: str  # the role, or the rank
    how: str
    strike_at: int  # the fault happens when every stream has this many tokens


def draw_faults(rng: random.Random, number: int, num_ranks: int) -> list[Fault]:
    """Faults of all kinds in random order, each kind about equally often."""
    kinds = [*KINDS] * (number // len(KINDS)) + rng.sample(KINDS, number % len(KINDS))
    rng.shuffle(kinds)
    return [
        Fault(
            role,
            f"rank {rng.randrange(num_ranks)}" if role == "rank" else role,
            how,
            rng.randint(16, NUM_TOKENS // 2 - 10),
        )
        for role, how in kinds
    ]


def run(
    executor: str, faults: list[Fault], model: str, layout: tuple[str, ...]
) -> tuple[list[tuple[Fault, float]], int, int]:
    """Pairs (fault, seconds until the next token), the number of requests, and the number of failed requests."""
    took, num_requests, num_failed = [], 0, 0
    arguments = (*ARGUMENTS, *layout, "--executor", executor, "--model", model)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, breakable_server(Path(folder), *arguments) as server:
        expected = undisturbed(server)
        for number, fault in enumerate(faults, 1):
            began = time.monotonic()
            act = partial(strike, server, fault.victim, fault.how)
            seen = disturb(server, expected, act, strike_at=fault.strike_at)
            failures = list(seen.failures)
            if fault.role != "launcher":  # ranks end together with their launcher
                before, after = seen.pids(after=False), seen.pids(after=True)
                if changed := [rank for rank in before if rank != fault.victim and before[rank] != after.get(rank)]:
                    failures.append(f"{', '.join(changed)} did not survive")
                if (blamed := seen.after["recoveries"][-1]["process"]) != fault.victim:
                    failures.append(f"{blamed} was blamed")
            if not seen.survivors_read_nothing():
                failures.append("a rank that lived read its weights again")
            took.append((fault, seen.seconds))
            num_requests += seen.num_requests
            num_failed += len(failures)
            print(
                f"{executor} {number}/{len(faults)}: {fault.victim} {fault.how} at {fault.strike_at} tokens: noticed "
                f"after {seen.noticed_s:.2f} s, tokens again after {seen.seconds:.2f} s, {len(failures)} of "
                f"{seen.num_requests} requests failed ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
            for failure in failures:
                print(f"  FAILED: {failure}", flush=True)
        if num_failed:
            print(server.log_text()[-20000:])
    return took, num_requests, num_failed


def table(took: dict[str, list[tuple[Fault, float]]]) -> str:
    """The table of faults, with the seconds from each fault to the next token of a running stream."""
    lines = [f"{'executor':9} {'role':9} {'fault':8} {'count':>5} {'p50 s':>7} {'max s':>7}"]
    for executor, faults in took.items():
        for role, how in KINDS:
            seconds = [seconds for fault, seconds in faults if (fault.role, fault.how) == (role, how)]
            if seconds:
                median = statistics.median(seconds)
                lines.append(f"{executor:9} {role:9} {how:8} {len(seconds):5} {median:7.2f} {max(seconds):7.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16), help="of the faults; printed")
    parser.add_argument("--faults", type=int, default=30, help="in all, shared among the executors")
    parser.add_argument("--executors", default="mp,ray", help="comma-separated, one server after the other")
    layouts = parser.add_mutually_exclusive_group()
    layouts.add_argument("--one-rank", action="store_true", help="with async scheduling, instead of two stages")
    layouts.add_argument(
        "--shards", action="store_true", help=f"{NUM_SHARDS} ranks in one stage, instead of two stages"
    )
    parser.add_argument("--model", default="builtin://smollm2-135m")
    args = parser.parse_args()
    executors = args.executors.split(",")
    print(f"seed {args.seed}, {args.faults} faults over {', '.join(executors)}", flush=True)
    rng, began = random.Random(args.seed), time.monotonic()
    took, num_requests, num_failed = {}, 0, 0
    for index, executor in enumerate(executors):
        share = (args.faults + index) // len(executors)
        layout, num_ranks = STAGES, NUM_STAGES
        if args.one_rank:
            layout, num_ranks = ONE_RANK, 1
        elif args.shards:
            layout, num_ranks = SHARDS, NUM_SHARDS
        faults = draw_faults(rng, share, num_ranks)
        took[executor], requests, failed = run(executor, faults, args.model, layout)
        num_requests, num_failed = num_requests + requests, num_failed + failed
    print(f"\nSeconds from the fault to the next token of a stream that was running:\n{table(took)}")
    print(f"\nseed {args.seed}: {num_failed} of {num_requests} requests failed; {time.monotonic() - began:.0f} s")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
