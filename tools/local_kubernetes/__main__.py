"""Commands of the test cluster: `PYTHONPATH=tools python3 -m local_kubernetes COMMAND`. `make` calls them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from local_kubernetes.clusters.choice import chosen_cluster
from local_kubernetes.clusters.local import LocalCluster, remove_left_builds
from local_kubernetes.dump import dump_cluster
from local_kubernetes.install import install_operator
from local_kubernetes.machine.debian import ensure_packages
from local_kubernetes.machine.kubectl import ensure_kubectl
from local_kubernetes.machine.place import known_indices
from local_kubernetes.machine.runs import end_runs, refuse_beside_another
from local_kubernetes.machine.shell import ClusterError, say
from local_kubernetes.parts.build import build_parts, traefik
from local_kubernetes.prepare import load_images, prepare


def main() -> int:
    parser = argparse.ArgumentParser(prog="local_kubernetes", description=__doc__)
    parser.add_argument("--index", type=int, help="index of a local cluster; default 0, and all of them for down")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start or repair the cluster, and print the path of its kubeconfig")
    up.add_argument("--mode", choices=("api", "full"), default="full")
    commands.add_parser("down", help="end every run and remove everything, also the remains of killed runs")
    parts = commands.add_parser("parts", help="compile the programs of a local cluster")
    parts.add_argument("--traefik", action="store_true", help="compile Traefik as well, for the slow tests on pods")
    commands.add_parser("images", help="build the images")
    commands.add_parser("load", help="build the images and load them on the nodes")
    commands.add_parser("prepare", help="do all that the end-to-end tests need, and print the seconds of each stage")
    dump = commands.add_parser("dump", help="write logs, events and objects into a folder")
    dump.add_argument("folder", type=Path)
    commands.add_parser("install", help="install the operator by its Helm chart")
    for command in ("stop-node", "start-node"):
        commands.add_parser(command, help=f"{command.partition('-')[0]} a node").add_argument("name")
    arguments = parser.parse_args()
    try:
        _run(arguments)
    except (ClusterError, ValueError) as error:
        print(f"local_kubernetes: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    cluster = chosen_cluster(os.environ, arguments.index or 0)
    match arguments.command:
        case "up":
            cluster.up(arguments.mode)
            say(f"up; export KUBECONFIG={cluster.kubeconfig}")
        case "down":
            if arguments.index is not None:
                cluster.down()
            else:
                refuse_beside_another()
                end_runs()
                for index in known_indices():
                    chosen_cluster(os.environ, index).down()
                remove_left_builds()
            say("down")
        case "parts":
            ensure_kubectl()
            if isinstance(cluster, LocalCluster):
                # Both steps are done here, because clusters that start at the same time cannot install packages and
                # build parts themselves.
                ensure_packages(nodes=False, images=False)
                build_parts()
                if arguments.traefik:
                    traefik()
        case "images":
            cluster.build_images()
        case "load":
            load_images(cluster)
        case "install":
            install_operator(cluster.kubeconfig)
        case "prepare":
            prepare(cluster)
        case "dump":
            dump_cluster(cluster, arguments.folder)
        case "stop-node":
            cluster.stop_node(arguments.name)
        case "start-node":
            cluster.start_node(arguments.name)


if __name__ == "__main__":
    sys.exit(main())
