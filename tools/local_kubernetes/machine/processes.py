"""Starts the cluster's processes in the background, recognises them in later commands, and ends them.

A process id is no proof of identity: after the end of a process another program may get its id. So each process has the
cluster's folder as a mark in its environment, which its children inherit. Only this mark decides which processes are
ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from local_kubernetes.machine.files import write_whole
from local_kubernetes.machine.place import digest
from local_kubernetes.machine.shell import PROGRAM_S, ClusterError, wait_until

_CLUSTER = "RAYLOOM_E2E_CLUSTER"
_PROCESS = "RAYLOOM_E2E_PROCESS"
_NUM_SHOWN_LINES = 5
# Children that outlive this process. The references prevent Python's warning about children that were not reaped.
_started: list[subprocess.Popen[bytes]] = []


class Processes:
    def __init__(self, state: Path) -> None:
        self._state = state
        self._records = state / "processes"
        self._wanted: set[str] = set()

    def ensure(self, name: str, *command: object, config: str = "") -> int:
        """The id of the process `name`, which runs `command`: an existing process or a new one.

        An existing process is ended first if it was started with another command or another `config`. `config` is the
        content of the files that the process reads. The process's output is in logs/NAME.log.
        """
        self._wanted.add(name)
        words = [str(word) for word in command]
        digest_of_config = digest(config.encode())
        record = self._record(name)
        if record is not None and record["command"] == words and record.get("config") == digest_of_config:
            pid: int = record["pid"]
            return pid
        self.stop(name)
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        marks = {_CLUSTER: str(self._state), _PROCESS: name}
        with log.open("ab") as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={"PATH": os.environ["PATH"], "HOME": "/"} | _memory_settings() | marks,
                start_new_session=True,
            )
        _started.append(process)
        # /proc does not show the environment of a process in its first moment. Until then, `stop` would overlook the
        # process.
        own = f"{_PROCESS}={name}".encode()

        def has_begun() -> bool:
            return _start_time(process.pid) is None or _carries(process.pid, own)

        wait_until(f"the start of {name}", has_begun, PROGRAM_S)
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        started = _start_time(process.pid)
        content = {"pid": process.pid, "started": started, "command": words, "config": digest_of_config}
        write_whole(path, json.dumps(content))
        return process.pid

    def log(self, name: str) -> Path:
        return self._state / "logs" / f"{name}.log"

    def is_alive(self, name: str) -> bool:
        """True while the process that `ensure` started under this name runs."""
        return self._record(name) is not None

    def expect_all_alive(self) -> None:
        """Raises ClusterError with the last lines of the logs when a process that this object ensured has ended."""
        ended = sorted(name for name in self._wanted if not self.is_alive(name))
        if ended:
            logs = "\n".join(f"{self.log(name)}, its end:\n{_end_of(self.log(name))}" for name in ended)
            raise ClusterError(f"processes of the cluster have ended: {', '.join(ended)}\n{logs}")

    def stop(self, name: str) -> None:
        """Kills the process of this name and its descendants. Returns when all of them have ended."""
        self._end(f"{_CLUSTER}={self._state}".encode(), f"{_PROCESS}={name}".encode())
        self._path(name).unlink(missing_ok=True)

    def stop_all(self) -> None:
        self._end(f"{_CLUSTER}={self._state}".encode())
        for path in self._records.glob("*.json"):
            path.unlink()

    def alive(self, name: str = "") -> tuple[int, ...]:
        """Ids of all processes with this cluster's mark, or of the process of this name and its descendants."""
        names = (f"{_PROCESS}={name}".encode(),) if name else ()
        return tuple(_marked(f"{_CLUSTER}={self._state}".encode(), *names))

    def _end(self, *marks: bytes) -> None:
        # A process that ends loses its memory first, and so its environment with the mark. It releases its ports later.
        ending: dict[int, list[str]] = {}

        def all_gone() -> bool:
            # The scan is repeated, because a process may have started another process in the meantime.
            found = _marked(*marks)
            for pid in found:
                ending.setdefault(pid, _stat(f"{pid}")[19:20])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found and not any(_is_ending(pid, started) for pid, started in ending.items())

        wait_until(f"the end of the processes marked {marks[-1].decode()}", all_gone, PROGRAM_S)

    def _record(self, name: str) -> dict[str, Any] | None:
        """The record that `ensure` wrote, or None if its process has ended."""
        try:
            record: dict[str, Any] = json.loads(self._path(name).read_text())
        except FileNotFoundError:
            return None
        started = _start_time(record["pid"])
        return record if started is not None and started == record["started"] else None

    def _path(self, name: str) -> Path:
        return self._records / f"{name}.json"


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_NUM_SHOWN_LINES:])


def _memory_settings() -> dict[str, str]:
    """Settings of Go's garbage collector, by which a benchmark trades memory for CPU time."""
    return {name: os.environ[name] for name in ("GOGC", "GOMEMLIMIT") if name in os.environ}


def carriers(variable: str) -> dict[int, str]:
    """Process id -> value, for all processes with this environment variable. A zombie has no environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            entries = (entry.partition(b"=") for entry in path.read_bytes().split(b"\0"))
            if values := [value for name, _, value in entries if name == variable.encode()]:
                found[int(path.parent.name)] = os.fsdecode(values[0])
    return found


def living_clusters() -> frozenset[Path]:
    """Folders of all running local clusters of this machine, of any user and checkout."""
    return frozenset(Path(folder) for folder in carriers(_CLUSTER).values())


def child_of(pid: int) -> int | None:
    """The id of the first child of a process; None when it has none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def _marked(*marks: bytes) -> list[int]:
    """Ids of processes with all these entries in their environment. A zombie has no environment."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if _carries(pid, *marks)]


def _carries(pid: int, *marks: bytes) -> bool:
    try:
        return set(marks) <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the process's start; None when the process does not exist or is a zombie."""
    fields = _stat(f"{pid}")
    return None if not fields or fields[0] in "ZX" else fields[19]


def _is_ending(pid: int, started: list[str]) -> bool:
    """True while any thread of the process with this start time runs, even if its first thread is a zombie."""
    threads = [_stat(f"{pid}/task/{path.name}") for path in Path(f"/proc/{pid}/task").glob("*")]
    # The start time is compared, because another process may have this id now.
    return _stat(f"{pid}")[19:20] == started and any(fields and fields[0] not in "ZX" for fields in threads)


def _stat(which: str) -> list[str]:
    """Fields of /proc/.../stat from the state on; empty when the process or thread does not exist."""
    try:
        # The second field is the program's name in parentheses and may itself hold spaces and parentheses.
        return Path(f"/proc/{which}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
