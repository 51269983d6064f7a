"""`rayloom-bench`: measurements and plans that need no running engine. `rayloom-engine bench` has all others."""

from __future__ import annotations

import argparse
import sys

from rayloom_bench.fleet import command as fleet
from rayloom_engine.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 for a wrong flag or file."""
    parser = argparse.ArgumentParser(prog="rayloom-bench", description=__doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    fleet.add_flags(
        subcommands.add_parser("fleet", description=fleet.__doc__, help="plan a fleet of engines in virtual time")
    )
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"rayloom-bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
