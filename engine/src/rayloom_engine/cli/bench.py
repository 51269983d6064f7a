"""`rayloom-engine bench`: only the entry of the command. Its code is the package `rayloom_bench`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from rayloom_engine.errors import EngineError

PACKAGE = "rayloom_bench"


class BenchMissing(EngineError):
    """The benchmark's package is not installed."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], arguments: Sequence[str]) -> None:
    """Adds the command `bench`. Raises BenchMissing.

    Adds its flags only if `arguments` begin with `bench`, so that other commands work without the benchmark's package.
    """
    parser = commands.add_parser(
        "bench", help="measure throughput and latency, compared with transformers and the machine's limit"
    )
    if arguments[:1] == ["bench"]:
        try:
            # Imported by name, because no module of the engine may import the benchmark.
            package = importlib.import_module(PACKAGE)
        except ModuleNotFoundError as error:
            if error.name != PACKAGE:
                raise
            raise BenchMissing(
                "`bench` needs the package rayloom-bench, which is not installed. "
                "Install it from Rayloom's repository with: pip install ./bench"
            ) from None
        package.add_flags(parser, arguments[1:])
