"""`rayloom-engine bench routing`: prefix hits and times to the first token with two real engines, by policy.

Requests with shared prefixes arrive at random. Three policies choose an engine for each request: the gateway's, round
robin, and fewest unfinished requests. The policies are measured in turn, with the same requests and with empty caches.
An engine has room for 14 of the 24 prefixes. With the last two policies, clients send directly to the engines, so no
proxy costs them time.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from rayloom_bench.fleet.arrivals import Arrival
from rayloom_bench.fleet.traffic import SharedPrefixes, generate_shared
from rayloom_bench.machine import busy_percent
from rayloom_bench.peers.engines.shown_command import shown
from rayloom_bench.report import machine_line
from rayloom_bench.routing.choices import CHOICES
from rayloom_bench.routing.figures import ChoiceFigures, best_hit_rate, figures_of, figures_table, verdicts
from rayloom_bench.routing.load import run_load
from rayloom_bench.routing.servers import running_engines
from rayloom_bench.server import ServerFailed
from rayloom_bench.settings import page_file, positive
from rayloom_engine.config import BLOCK_SIZE, EngineConfig
from rayloom_engine.errors import ConfigError, EngineError
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.models.shape import read_shape

PAGE = "routing.md"
NUM_ENGINES = 2
CACHED_PREFIXES = 14  # prefixes for which an engine has room beside its running requests
MAX_NUM_SEQS = 16


class NoAnswer(EngineError):
    """All requests of one choice failed."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("--model", default=EngineConfig().model, help="the checkpoint")
    parser.add_argument("--rate", type=float, default=4.0, help="requests in a second (default 4)")
    parser.add_argument("--requests", type=int, default=400, help="requests of each choice (default 400)")
    parser.add_argument(
        "--warm-up", type=int, default=0, help="first requests that fill the caches and are not counted (default 0)"
    )
    parser.add_argument("--prefix-tokens", type=int, default=1024, help="tokens of a prefix (default 1024)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help=f"write {PAGE} into this folder")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 1 if a server or a request failed, else 0; a missed goal is in the text.

    Raises ConfigError.
    """
    from rayloom_bench.command import exit_in_order

    num_requests = positive("--requests", args.requests)
    num_prefix = positive("--prefix-tokens", args.prefix_tokens)
    assert num_requests is not None and num_prefix is not None
    if args.rate <= 0:
        raise ConfigError(f"--rate: {args.rate:g} given; it must be more than 0")
    if not 0 <= args.warm_up < num_requests:
        raise ConfigError(
            f"--warm-up: {args.warm_up} given; it must be at least 0 and less than --requests, {num_requests}"
        )
    target = page_file(args.page, PAGE)
    previous = signal.signal(signal.SIGTERM, exit_in_order)
    try:
        return _run(args, num_requests, SharedPrefixes(rate=args.rate, num_prefix_tokens=num_prefix), target)
    except (ServerFailed, NoAnswer) as error:
        print(f"rayloom-engine bench routing: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(args: argparse.Namespace, num_requests: int, prefixes: SharedPrefixes, target: Path | None) -> int:
    busy = busy_percent()
    arrivals = list(generate_shared(prefixes, num_requests=num_requests, seed=args.seed))
    found = _measure(args.model, prefixes, arrivals, args.warm_up)
    best = best_hit_rate(arrivals, args.warm_up)
    warm_up = f"The first {args.warm_up} of them fill the caches and are not counted. " if args.warm_up else ""
    conditions = (
        f"{machine_line(busy)} {args.model}, "
        f"{NUM_ENGINES} engines of one thread. {num_requests} requests for each choice, {args.rate:g} a second "
        f"(Poisson): one of {prefixes.num_prefixes} prefixes of {prefixes.num_prefix_tokens} tokens by Zipf's law, "
        f"{prefixes.num_own} tokens in, {prefixes.num_output} out. {warm_up}"
        f"An engine has room for {CACHED_PREFIXES} prefixes."
    )
    text = "\n\n".join((conditions, figures_table(found, best), "\n".join(verdicts(found, best))))
    print(text)
    for name, each in found.items():
        for failure in each.failures[:3]:
            print(f"{name}: {failure}", file=sys.stderr)
    if args.json is not None:
        document = {"best_hit_rate": best, **{name: asdict(each) for name, each in found.items()}}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if target is not None:
        title = "# Prefix hits and first tokens by the choice of an engine"
        command = f"Written by `{shown(['rayloom-engine', *sys.argv[1:]])}`."
        target.write_text(f"{title}\n\n{command}\n\n{text}\n", encoding="utf-8")
    return 1 if any(each.failures for each in found.values()) else 0


def engine_flags(model: str, prefixes: SharedPrefixes) -> list[str]:
    """Flags of an engine with room for CACHED_PREFIXES prefixes and the own tokens of MAX_NUM_SEQS requests."""
    num_own = prefixes.num_own + prefixes.num_output
    prefix_blocks = -(-prefixes.num_prefix_tokens // BLOCK_SIZE)
    own_blocks = -(-num_own // BLOCK_SIZE) + 1
    num_blocks = CACHED_PREFIXES * prefix_blocks + MAX_NUM_SEQS * own_blocks
    flags = {
        "--model": model,
        "--device": "cpu",
        "--threads": "1",
        "--max-num-seqs": str(MAX_NUM_SEQS),
        "--num-kv-blocks": str(num_blocks),
        "--max-model-len": str(prefixes.num_prefix_tokens + num_own),
    }
    return [part for pair in flags.items() for part in pair]


def _measure(
    model: str, prefixes: SharedPrefixes, arrivals: Sequence[Arrival], num_warm_up: int
) -> dict[str, ChoiceFigures]:
    vocab_size = read_shape(resolve(model, None).path).vocab_size
    flags = engine_flags(model, prefixes)
    found = {}
    for name, make in CHOICES.items():
        progress = tqdm(total=len(arrivals), desc=name, unit="request", file=sys.stderr)
        with running_engines(NUM_ENGINES, flags) as engines, progress:
            load = run_load(arrivals, make(engines), vocab_size, progress.update, num_warm_up=num_warm_up)
        if not load.answered:
            reason = load.failures[0] if load.failures else "all answers belong to the warm-up"
            raise NoAnswer(f"{name}: no request was answered: {reason}")
        found[name] = figures_of(load)
    return found
