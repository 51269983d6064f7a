"""The `rayloom-operator` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rayloom_operator.errors import OperatorError, SpecError
from rayloom_operator.local import LocalOptions, serve_local

# argparse's own code for a command line that cannot be used; a manifest that cannot be used is the same to a caller.
_EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code: 0 done, 1 failed, 2 wrong input, or the engine's own code."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options) if options.command == "run" else _local(options)
    except OperatorError as error:
        print(f"rayloom-operator: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    # Imported here: `local` is to start fast, and has no use for what speaks to clusters.
    from rayloom_operator.run import RunOptions, run_operator

    return run_operator(
        RunOptions(
            engine_image=options.engine_image,
            key_file=options.key_file,
            health_port=options.health_port,
            log_level=options.log_level,
        )
    )


def _local(options: argparse.Namespace) -> int:
    local_options = LocalOptions(
        manifest=options.file,
        host=options.host,
        port=options.port,
        admin_port=options.admin_port,
        has_sample=options.sample,
    )
    try:
        return serve_local(local_options)
    except SpecError as error:
        print(f"rayloom-operator: {options.file} cannot be served:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        return _EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rayloom-operator", description="Serves large language models from manifests."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    local = commands.add_parser(
        "local",
        help="serve a manifest on this machine, without a cluster",
        description="Serves the LLMService in FILE on this machine by one rayloom-engine process, until Ctrl-C.",
    )
    local.add_argument("-f", "--file", type=Path, required=True, help="YAML file with one LLMService")
    local.add_argument("--host", default="127.0.0.1", help="address of the API port (default: %(default)s)")
    local.add_argument("--port", type=_port, default=8000, help="API port; 0 picks a free one (default: %(default)s)")
    local.add_argument(
        "--admin-port",
        type=_port,
        default=8001,
        help="admin port on loopback; 0 picks a free one (default: %(default)s)",
    )
    local.add_argument(
        "--no-sample", dest="sample", action="store_false", help="do not ask a sample question once it serves"
    )
    run = commands.add_parser(
        "run",
        help="serve the LLMServices of a Kubernetes cluster",
        description="Runs the operator against the cluster that it is in, or that KUBECONFIG names, until SIGTERM.",
    )
    run.add_argument("--engine-image", required=True, help="image of engines whose LLMService names none")
    run.add_argument(
        "--key-file", type=Path, required=True, help="file with random bytes that the engines' tokens are derived from"
    )
    run.add_argument(
        "--health-port", type=_port, default=8080, help="port of /healthz on all addresses (default: %(default)s)"
    )
    run.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="default: %(default)s"
    )
    return parser


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use a number from 0 to 65535")
    return port


if __name__ == "__main__":
    sys.exit(main())
