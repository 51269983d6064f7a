"""The commands of `rayloom-engine`, and what they have in common: errors in one sentence, exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rayloom_engine import __version__
from rayloom_engine.cli import bench, doctor, generate, inspect_model, serve
from rayloom_engine.errors import EngineError
from rayloom_engine.process import EXIT_CONFIG


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="rayloom-engine", description="Serve a large language model.")
    parser.add_argument("--version", action="version", version=f"rayloom-engine {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    for module in (serve, generate, inspect_model, doctor):
        module.add_parser(commands)
    try:
        bench.add_parser(commands, arguments)
        args = parser.parse_args(arguments)
        code: int = args.run(args)
    except EngineError as error:
        print(f"rayloom-engine: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130
    return code
