"""Views from inside a container: its processes with their rights, and the listening ports of its pod.

Also the rights that a container's manifest gives it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from local_kubernetes.machine.kubectl import Kubectl

# Runs in the container. State 0A is LISTEN; addresses are hexadecimal (Linux, Documentation/networking/proc_net_tcp).
_LOOK = """
import errno, json, os, pathlib

def words(path):
    try:
        return pathlib.Path(path).read_text().split()
    except OSError:  # the process has ended
        return []

def fields(pid):
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines)
    return {name: found[name].split() for name in ("Name", "Uid", "Gid", "CapEff", "NoNewPrivs", "Seccomp")}

def listening():
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            address, _, port = local.partition(":")
            if state == ("0A" if table.startswith("tcp") else "07"):
                yield [table.rstrip("6"), int(port, 16), "0100007F" in address]

def write_error(folder):
    path = f"{folder}/rayloom-was-here"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    except OSError as error:
        return errno.errorcode[error.errno]
    os.unlink(path)
    return ""

mounts = [line.split() for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
print(json.dumps({
    "processes": [found for pid in os.listdir("/proc") if pid.isdigit() and (found := fields(pid))],
    "listening": sorted(listening()),
    "root_is_read_only": any(m[1] == "/" and "ro" in m[3].split(",") for m in mounts),
    "write_error": write_error(""),
    "has_token": os.path.exists("/var/run/secrets/kubernetes.io"),
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The inside of a container. `processes`: fields of /proc/PID/status for each process in its process namespace."""

    processes: list[dict[str, list[str]]]
    ports: frozenset[tuple[str, int]]  # (tcp or udp, port) that other pods can reach
    root_is_read_only: bool
    write_error: str  # error of an attempt to write below /
    has_token: bool  # a token for the Kubernetes API is mounted


def look_inside(kubectl: Kubectl, pod: dict[str, Any], container: str) -> Inside:
    """Runs a script in a container that has python3."""
    meta = pod["metadata"]
    command = ("exec", "--namespace", meta["namespace"], meta["name"], "--container", container, "--", "python3", "-c")
    said = json.loads(kubectl(*command, _LOOK))
    listening = said.pop("listening")
    return Inside(ports=frozenset((kind, port) for kind, port, is_local in listening if not is_local), **said)


def excess(found: Inside) -> list[str]:
    """In words: rights of the container that none of our containers may have."""
    problems = [
        f"{process['Name'][0]}: {name} {process[name]}"
        for process in found.processes
        for name, allowed in _RESTRICTED.items()
        if set(process[name]) != {allowed}
    ]
    if not found.root_is_read_only or found.write_error != "EROFS":
        problems.append(f"its root file system can be written to ({found.write_error or 'a file was made'})")
    if found.has_token:
        problems.append("it has a token for the Kubernetes API")
    return problems


# Allowed fields of /proc/PID/status: the image's user and group, no capability, no new privileges, a seccomp filter.
_RESTRICTED = {
    "Uid": "1000",
    "Gid": "1000",
    "CapEff": "0000000000000000",
    "NoNewPrivs": "1",
    "Seccomp": "2",
}


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod's containers, with its init containers."""
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def is_restricted(container: dict[str, Any]) -> bool:
    """True if the container's manifest removes all rights that our containers do not need."""
    rights = container.get("securityContext", {})
    return (
        rights.get("readOnlyRootFilesystem") is True
        and rights.get("allowPrivilegeEscalation") is False
        and rights.get("capabilities") == {"drop": ["ALL"]}
    )
