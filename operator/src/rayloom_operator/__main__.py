"""The `rayloom-operator` command."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rayloom_operator import __version__
from rayloom_operator.api.pod_template.privileges import PRIVILEGES
from rayloom_operator.decide.permissions import SAFE_ANNOTATIONS
from rayloom_operator.errors import OperatorError, SpecError
from rayloom_operator.local.serve import serve_local

# argparse exits with this code for a wrong command line. A wrong manifest gets the same code.
_EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns its exit code: 0 done, 1 failed, 2 wrong input; `local` returns the engine's code."""
    parser = _parser()
    flags = vars(parser.parse_args(arguments))
    command = flags.pop("command")
    if command is None:
        parser.print_help()
        return _EXIT_USAGE
    try:
        if command == "local":
            try:
                return serve_local(**flags)
            except BrokenPipeError:
                _discard_output()
                print("rayloom-operator: the reader of the output has ended, so local has ended, too", file=sys.stderr)
                return 1
        # Imported here, because `local` needs neither a planner nor a Kubernetes client and starts faster without them.
        if command == "plan":
            from rayloom_operator.cli.plan import print_plan

            try:
                code = print_plan(**flags)
                sys.stdout.flush()
            except BrokenPipeError:
                _discard_output()
                return 0
            return code
        from rayloom_operator.cli.run import RunFlags, run_operator

        run_operator(RunFlags(**flags))
        return 0
    except SpecError as error:
        files = " or ".join(map(str, flags.get("rollout") or [flags["manifest"]]))
        print(f"rayloom-operator: {files} cannot be served:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        return _EXIT_USAGE
    except OperatorError as error:
        print(f"rayloom-operator: {error}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """Replaces stdout by /dev/null, because the reader of stdout, such as `head`, has ended.

    Otherwise Python would write the rest of the output at exit, and fail.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rayloom-operator", description="Serves large language models from manifests."
    )
    parser.add_argument("--version", action="version", version=f"rayloom-operator {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    _add_local_flags(
        commands.add_parser(
            "local",
            help="serve a manifest on this machine, without a cluster",
            description="Serves the LLMService in FILE on this machine, until Ctrl-C: by one engine, or by as many as "
            "its `replicas` behind a gateway, which has the ports that are given here.",
        )
    )
    _add_plan_flags(
        commands.add_parser(
            "plan",
            help="print the objects that the operator would create for a manifest",
            description="Prints the parallelism that the operator would choose for the LLMService in FILE, with the "
            "reason, and the objects that it would create. With --rollout prints the steps of a rollout. Changes "
            "nothing, and needs no cluster.",
        )
    )
    _add_run_flags(
        commands.add_parser(
            "run",
            help="serve the LLMServices of a Kubernetes cluster",
            description="Runs the operator against the cluster that it is in, or that KUBECONFIG names, until SIGTERM.",
        )
    )
    return parser


def _add_local_flags(local: argparse.ArgumentParser) -> None:
    file_help = "YAML file with one LLMService"
    local.add_argument("-f", "--file", dest="manifest", metavar="FILE", type=Path, required=True, help=file_help)
    local.add_argument("--host", default="127.0.0.1", help="address of the API port (default: %(default)s)")
    local.add_argument("--port", type=_port, default=8000, help="API port; 0 picks a free one (default: %(default)s)")
    admin_help = "admin port on loopback; 0 picks a free one (default: %(default)s)"
    local.add_argument("--admin-port", type=_port, default=8001, help=admin_help)
    share_help = "ranks of an engine that share an accelerator, to try a manifest on fewer of them; slow (default: 1)"
    local.add_argument("--ranks-per-gpu", type=_ranks_per_gpu, default=1, metavar="N", help=share_help)
    no_sample = "do not ask a sample question once the engine serves"
    local.add_argument("--no-sample", dest="has_sample", action="store_false", help=no_sample)


def _add_plan_flags(plan: argparse.ArgumentParser) -> None:
    either = plan.add_mutually_exclusive_group(required=True)
    file_help = "YAML file with one LLMService"
    either.add_argument("-f", "--file", dest="manifest", metavar="FILE", type=Path, help=file_help)
    rollout_help = "print instead the steps of a rollout from OLD to NEW in which nothing fails"
    either.add_argument("--rollout", metavar=("OLD", "NEW"), nargs=2, type=Path, help=rollout_help)
    facts_help = "file with the output of `rayloom-engine inspect` for the model; not needed for builtin:// models"
    plan.add_argument("--facts", metavar="FILE", type=Path, help=facts_help)
    old_facts_help = "file with that output for the model of OLD; needed only if NEW has another model"
    plan.add_argument("--old-facts", metavar="FILE", type=Path, help=old_facts_help)
    image_help = "image of an engine whose LLMService names none (default: %(default)s)"
    plan.add_argument("--engine-image", default=f"rayloom/engine:{__version__}", help=image_help)
    output_help = "text, or yaml for the objects (default: %(default)s)"
    plan.add_argument("-o", "--output", choices=("text", "yaml"), default="text", help=output_help)


def _add_run_flags(run: argparse.ArgumentParser) -> None:
    run.add_argument("--engine-image", required=True, help="image of engines whose LLMService names none")
    key_help = "file with random bytes from which the admin tokens of engines are derived"
    run.add_argument("--key-file", type=Path, required=True, help=key_help)
    previous_help = "file with the previous key, for engines that were created with it; the file may be missing"
    run.add_argument("--previous-key-file", metavar="FILE", type=Path, help=previous_help)
    tls_help = "TLS between gateway pods and engines: off; permissive, also clear text with engines that have no TLS; "
    tls_help += "strict (default: %(default)s)"
    run.add_argument("--pod-tls", choices=("off", "permissive", "strict"), default="off", help=tls_help)
    own_help = "namespace of the operator's pods, from which engines admit admin requests (default: any namespace)"
    run.add_argument("--namespace", default="", help=own_help)
    port_help = "port of /healthz, /readyz and /metrics (default: %(default)s)"
    run.add_argument("--health-port", type=_port, default=8080, help=port_help)
    run.add_argument("--hub-endpoint", default="", metavar="URL", help="mirror of the models' hub")
    ca_help = "ConfigMap in each service's namespace whose ca.crt has all CA certificates to trust for a hub"
    run.add_argument("--hub-ca-config-map", default="", metavar="NAME", help=ca_help)
    paths_help = "folders of nodes, separated by commas, that file:// and cache.hostPath may name; / for all of them"
    run.add_argument(
        "--allow-host-paths", dest="host_paths", metavar="FOLDERS", type=_paths, default=(), help=paths_help
    )
    endpoint_help = "let HF_ENDPOINT in a manifest choose the server to which the manifest's hub token is sent"
    run.add_argument("--allow-hub-endpoints", dest="hub_endpoints", action="store_true", help=endpoint_help)
    routes_help = "make no HTTPRoutes and Ingresses, and delete those that exist"
    run.add_argument("--no-routes", dest="routes", action="store_false", help=routes_help)
    keys_help = "keys of annotations that an Ingress may have, separated by commas; one may end with * (default: those "
    keys_help += "that docs/operator.md lists)"
    run.add_argument("--route-annotations", metavar="KEYS", type=_annotations, default=SAFE_ANNOTATIONS, help=keys_help)
    pods_help = "privileges of pod templates, separated by commas: " + ", ".join((*PRIVILEGES, "or a capability"))
    run.add_argument(
        "--allow-in-pod-templates",
        dest="allowed_in_pod_templates",
        metavar="NAMES",
        type=_privileges,
        default=frozenset(),
        help=pods_help,
    )
    number_help = "number of services that are reconciled at once, 1 to 64 (default: %(default)s)"
    run.add_argument("--max-reconciles", metavar="NUMBER", type=_max_reconciles, default=4, help=number_help)
    window_help = "seconds over which the load of an autoscaled service is averaged, 1 to 3600 (default: %(default)s)"
    run.add_argument("--autoscaling-window", metavar="SECONDS", type=_window_seconds, default=60, help=window_help)
    levels = ("debug", "info", "warning", "error")
    run.add_argument("--log-level", default="info", choices=levels, help="lowest level (default: %(default)s)")
    form_help = "lines of text, or one JSON object per line (default: %(default)s)"
    run.add_argument("--log-format", default="text", choices=("text", "json"), help=form_help)
    watch_help = "serve LLMServices of these namespaces only, separated by commas (default: all)"
    run.add_argument("--watch-namespaces", metavar="NAMESPACES", type=_names, default=(), help=watch_help)
    where_help = "namespace of the Lease that elects one of several operators (default: %(default)s)"
    run.add_argument("--lease-namespace", default="default", help=where_help)
    name_help = "name of that Lease; an operator that serves other namespaces needs another (default: %(default)s)"
    run.add_argument("--lease-name", default="rayloom-operator", help=name_help)
    seconds_help = "seconds without a renewal after which another operator leads; at least 2 (default: %(default)s)"
    run.add_argument("--lease-seconds", type=_lease_seconds, default=6, help=seconds_help)


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use a number from 0 to 65535")
    return port


def _ranks_per_gpu(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; use 1 or more")
    return number


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if bad := [name for name in names if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)]:
        raise argparse.ArgumentTypeError(f"{bad[0]!r} is no name of a namespace; write names with commas between: a,b")
    return names


def _paths(text: str) -> tuple[str, ...]:
    paths = tuple(path.strip() for path in text.split(",") if path.strip())
    if bad := [path for path in paths if not path.startswith("/") or ".." in path.split("/")]:
        raise argparse.ArgumentTypeError(
            f"{bad[0]!r} is no folder of a node; write whole paths, without .., with commas between: /models,/data"
        )
    return paths


def _annotations(text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(",") if key.strip())
    if bad := [key for key in keys if not re.fullmatch(r"[-A-Za-z0-9_./]+[*]?|[*]", key)]:
        raise argparse.ArgumentTypeError(
            f"{bad[0]!r} is no key of an annotation; write keys with commas between, each whole or with * at its end"
        )
    return keys


def _privileges(text: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if bad := [name for name in names if name not in PRIVILEGES and not re.fullmatch(r"[A-Z][A-Z_]*", name)]:
        raise argparse.ArgumentTypeError(
            f"{bad[0]!r} is nothing that can be allowed; use {', '.join(PRIVILEGES)}, or capabilities such as IPC_LOCK"
        )
    return frozenset(names)


def _max_reconciles(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 64):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 64")
    return int(text)


def _window_seconds(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 3600):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of seconds from 1 to 3600")
    return int(text)


def _lease_seconds(text: str) -> int:
    if not (text.isdecimal() and 2 <= int(text) <= 3600):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of seconds from 2 to 3600")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
