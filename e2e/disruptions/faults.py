"""Faults, made from outside: signals to processes of a pod. Shipped code has no hooks."""

from __future__ import annotations

from typing import Any

from local_kubernetes.machine.kubectl import Kubectl

# Looks through command lines; the pattern is not to find the shell that has it in its own.
_SIGNAL = """\
for process in /proc/[0-9]*; do
  if tr '\\0' ' ' < $process/cmdline 2>/dev/null | grep -q -- "$2"; then kill -"$1" "${process#/proc/}" && found=1; fi
done
[ -n "$found" ]
"""


def signal_rank(kubectl: Kubectl, namespace: str, rank: dict[str, Any], signal: str) -> float:
    """`rank` is an entry of the engine's /status. Returns when it got the signal, in Unix time of its node."""
    target = ("exec", "--namespace", namespace, rank["host"], "--container", "ray-worker", "--")
    return float(kubectl(*target, "sh", "-c", f"kill -{signal} {rank['pid']} && date +%s.%N"))


def signal_process(
    kubectl: Kubectl, namespace: str, pod: str, container: str, pattern: str, signal: str = "KILL"
) -> None:
    """`signal` for the processes of a container whose command line holds `pattern`, a regular expression that does not
    match itself, such as gcs[_]server. Raises ClusterError when there is none."""
    target = ("exec", "--namespace", namespace, pod, "--container", container, "--")
    kubectl(*target, "sh", "-c", _SIGNAL, "sh", signal, pattern)
