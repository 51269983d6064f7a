"""`rayloom-engine bench`: the command is listed here; what it does is a package of its own, `rayloom_bench`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from rayloom_engine.errors import EngineError

PACKAGE = "rayloom_bench"


class BenchMissing(EngineError):
    """The benchmark's package is not installed."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], arguments: Sequence[str]) -> None:
    """The flags are added only when `arguments` name this command: the others neither need nor load the package.

    Raises BenchMissing.
    """
    parser = commands.add_parser(
        "bench", help="measure throughput and latency, beside transformers and the machine's limit"
    )
    if arguments[:1] == ["bench"]:
        try:
            # By its name alone: the benchmark imports the engine, never the other way round.
            package = importlib.import_module(PACKAGE)
        except ModuleNotFoundError as error:
            if error.name != PACKAGE:
                raise
            raise BenchMissing(
                "`bench` needs the package rayloom-bench, which is not installed. "
                "Install it from Rayloom's repository with: pip install ./bench"
            ) from None
        package.add_flags(parser, arguments[1:])
