"""`rayloom-engine bench gateway`: CPU time of the gateway for each streamed event, compared with other proxies.

Starts simulated engines, the gateway, a plain server of events, a proxy on aiohttp, and nginx if it is installed, all
on this machine. Clients read many streams from each server in turn. Prints the CPU time of each server for each event
that a client got. Also prints the time from a single request to its first event, without and with the streams.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from rayloom_bench.machine import busy_percent
from rayloom_bench.report import machine_line
from rayloom_bench.settings import page_file

PAGE = "gateway.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--streams", type=_positive, default=200, help="streams at a time (default 200)")
    parser.add_argument("--rate", type=_positive, default=50, help="tokens of a stream in a second (default 50)")
    parser.add_argument("--engines", type=_positive, default=2, help="simulated engines (default 2)")
    parser.add_argument("--seconds", type=_positive, default=8, help="measured seconds of a round (default 8)")
    parser.add_argument("--probes", type=_positive, default=100, help="single requests of a round (default 100)")
    parser.add_argument("--rounds", type=_positive, default=3, help="rounds of each server (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help=f"write {PAGE} into this folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 0, or 1 if a server or a stream failed; a missed goal is in the text."""
    from rayloom_bench.command import exit_in_order
    from rayloom_bench.gateway.load import LoadFailed, LoadSettings
    from rayloom_bench.gateway.page import figures_table, page, verdicts
    from rayloom_bench.gateway.rounds import measure
    from rayloom_bench.gateway.servers import running_servers
    from rayloom_bench.server import ServerFailed

    target = page_file(args.page, PAGE)
    signal.signal(signal.SIGTERM, exit_in_order)
    busy = busy_percent()
    settings = LoadSettings(num_streams=args.streams, window_s=args.seconds, num_probes=args.probes)
    try:
        with running_servers(args.engines, args.rate) as servers:
            figures = measure(servers, settings, args.rounds, lambda line: print(line, file=sys.stderr, flush=True))
    except (LoadFailed, ServerFailed) as failure:
        print(f"rayloom-engine bench gateway: {failure}", file=sys.stderr)
        return 1
    conditions = machine_line(busy)
    workload = (
        f"{args.streams} streams, each with an event every {1000 / args.rate:.0f} ms, from {args.engines} simulated "
        f"engines or one plain server; {args.rounds} rounds of {args.seconds} s for each server in turn, median "
        f"(minimum to maximum). Each round sends {args.probes} single requests before the streams begin, and "
        f"{args.probes} beside them."
    )
    print(conditions, workload, figures_table(figures), "\n".join(verdicts(figures)), sep="\n\n")
    if args.json is not None:
        document = {
            each.name: {
                "event_us": each.event_us,
                "events_s": each.events_s,
                "first_event_ms": each.first_event_ms,
                "alone_first_event_ms": each.alone_first_event_ms,
            }
            for each in figures
            if each.rounds
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if target is not None:
        target.write_text(page(conditions, workload, figures), encoding="utf-8")
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
