"""The commands of `rayloom-engine`. All of them print errors as one line and use the same exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rayloom_engine import __version__
from rayloom_engine.cli import bench, doctor, gateway, generate, inspect_model, serve
from rayloom_engine.cli.unknown_flags import complaints
from rayloom_engine.common.process import EXIT_CONFIG
from rayloom_engine.errors import EngineError
from rayloom_engine.supervisor.prepared import PreparedProcess

_EXIT_USAGE = 2  # argparse uses the same code
_COMMANDS = {
    "serve": serve.add_parser,
    "gateway": gateway.add_parser,
    "generate": generate.add_parser,
    "inspect": inspect_model.add_parser,
    "doctor": doctor.add_parser,
}

_EPILOG = """\
examples:
  rayloom-engine serve                                the small built-in model at http://127.0.0.1:8000/v1
  rayloom-engine serve hf://Qwen/Qwen3-0.6B           a model of the Hugging Face hub
  rayloom-engine serve /models/llama --host 0.0.0.0   a local folder, also for other machines
  rayloom-engine serve --help                         every flag and its default
"""


def run(arguments: Sequence[str], core: PreparedProcess | None = None) -> int:
    """Runs one command and returns its exit code. Raises SystemExit if the command line is not valid.

    `core`: a core process for `serve`, which has begun its imports; None for other commands.
    """
    parser = argparse.ArgumentParser(
        prog="rayloom-engine",
        description="Serve a large language model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rayloom-engine {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    # If the first argument is a command, only this command's flags are added, because adding the flags of all commands
    # takes 10 ms.
    chosen = _COMMANDS.get(arguments[0]) if arguments else None
    for add_parser in (chosen,) if chosen is not None else _COMMANDS.values():
        add_parser(commands)
    try:
        bench.add_parser(commands, arguments)
        if not arguments:
            parser.print_help()
            return _EXIT_USAGE
        args, unknown = parser.parse_known_args(arguments)
        if args.command is None:
            parser.error("a command is missing; rayloom-engine --help lists them")
        if unknown:
            command = commands.choices[args.command]
            command.exit(
                _EXIT_USAGE, "".join(f"{command.prog}: {each}\n" for each in complaints(unknown, _flags(command)))
            )
        args.core = core
        code: int = args.run(args)
    except EngineError as error:
        print(f"rayloom-engine: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130
    return code


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]
