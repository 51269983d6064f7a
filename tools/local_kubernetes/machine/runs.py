"""Runs on the test cluster: refuses a second checkout, and ends the processes of killed runs.

`make` and `.ci/run` put their checkout into the environment of every process that they start for the cluster. The
cluster's own processes are started without this variable, so they are not part of a run.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from local_kubernetes.machine.place import REPOSITORY
from local_kubernetes.machine.processes import carriers, living_clusters
from local_kubernetes.machine.shell import PROGRAM_S, ClusterError, wait_until

_RUN = "RAYLOOM_E2E_RUN"


def refuse_beside_another() -> None:
    """Raises ClusterError while another checkout has a run: clusters share addresses, so both runs would fail."""
    for pid, checkout in carriers(_RUN).items():
        if checkout != str(REPOSITORY):
            raise ClusterError(
                f"{checkout} has a run on this machine's test cluster (process {pid}). Wait for its end, or end it: "
                f"make -C {checkout} cluster-down"
            )


def refuse_beside_twin(state: Path) -> None:
    """Raises ClusterError while a cluster of the same index runs in another state folder, for example if HOME differs.

    No other check would find the other cluster: our API server would use the other cluster's etcd, and our readiness
    check would reach the other cluster's KubeRay.
    """
    for twin in living_clusters() - {state}:
        if twin.name == state.name:
            raise ClusterError(
                f"a local cluster with the same addresses runs in {twin}. End it: "
                f"XDG_STATE_HOME={twin.parents[2]} make cluster-down"
            )


def end_runs() -> None:
    """Ends all runs of this checkout with their descendants, except this process and its ancestors."""
    spared = {os.getpid(), *_ancestors(os.getpid())}

    def all_gone() -> bool:
        # The scan is repeated, because a process may have started another process in the meantime.
        found = _with_descendants({pid for pid, one in carriers(_RUN).items() if one == str(REPOSITORY)} - spared)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_until("the end of an earlier run's processes", all_gone, PROGRAM_S)


def _ancestors(pid: int) -> list[int]:
    parents = _parents()
    found = []
    while pid := parents.get(pid, 0):
        found.append(pid)
    return found


def _with_descendants(pids: set[int]) -> set[int]:
    """Returns these processes and their descendants. A descendant, such as a build step, may lack the mark."""
    parents = _parents()
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _parents() -> dict[int, int]:
    """Process id -> id of its parent, for all processes."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Fields after the program's name in parentheses: state, parent.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return parents
