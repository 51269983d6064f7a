"""Faults by signals to processes of a pod. Engine and operator have no hooks for faults."""

from __future__ import annotations

from typing import Any

from local_kubernetes.machine.kubectl import Kubectl

# Searches all command lines. The pattern must not match the command line of the searching shell.
_SIGNAL = """\
for process in /proc/[0-9]*; do
  if tr '\\0' ' ' < $process/cmdline 2>/dev/null | grep -q -- "$2"; then kill -"$1" "${process#/proc/}" && found=1; fi
done
[ -n "$found" ]
"""


def signal_rank(kubectl: Kubectl, namespace: str, rank: dict[str, Any], signal: str) -> float:
    """Sends a signal to `rank`, an entry of the engine's /status. Returns the Unix time on its node."""
    target = ("exec", "--namespace", namespace, rank["host"], "--container", "ray-worker", "--")
    return float(kubectl(*target, "sh", "-c", f"kill -{signal} {rank['pid']} && date +%s.%N"))


def signal_process(
    kubectl: Kubectl, namespace: str, pod: str, container: str, pattern: str, signal: str = "KILL"
) -> None:
    """Sends a signal to the processes of a container whose command line matches `pattern`.

    The regular expression must not match its own text: for example gcs[_]server. Raises ClusterError without a match.
    """
    target = ("exec", "--namespace", namespace, pod, "--container", container, "--")
    kubectl(*target, "sh", "-c", _SIGNAL, "sh", signal, pattern)
