"""The cluster's processes: started in the background, known again by every later command, and ended without a trace.

A process id says nothing once its process is gone: another program may have got it. So each process carries the
cluster's folder in its environment, which its children inherit, and that alone decides what is ended.
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
from local_kubernetes.machine.shell import ClusterError, wait_until

_CLUSTER = "RAYLOOM_E2E_CLUSTER"
_PROCESS = "RAYLOOM_E2E_PROCESS"
_NUM_SHOWN_LINES = 5
# Kept so that Python does not warn about children that it has not waited for: they are meant to outlive it.
_started: list[subprocess.Popen[bytes]] = []


class Processes:
    def __init__(self, state: Path) -> None:
        self._state = state
        self._records = state / "processes"
        self._wanted: set[str] = set()

    def ensure(self, name: str, *command: object, config: str = "") -> int:
        """The id of the process `name`, which runs `command`: the one that does already, or a new one.

        One that runs another command is ended first, and one that was started when the files that it reads held
        another `config`. Its output is in logs/NAME.log.
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
        # The system shows no environment yet in the first moment: what is stopped then would be overlooked.
        own = f"{_PROCESS}={name}".encode()
        wait_until(f"the start of {name}", lambda: _start_time(process.pid) is None or _carries(process.pid, own), 30)
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        started = _start_time(process.pid)
        content = {"pid": process.pid, "started": started, "command": words, "config": digest_of_config}
        write_whole(path, json.dumps(content))
        return process.pid

    def log(self, name: str) -> Path:
        return self._state / "logs" / f"{name}.log"

    def is_alive(self, name: str) -> bool:
        """Whether the process that `ensure` started under this name still runs."""
        return self._record(name) is not None

    def expect_all_alive(self) -> None:
        """Raises ClusterError, with the end of their logs, when some that `ensure` was asked for here have ended."""
        ended = sorted(name for name in self._wanted if not self.is_alive(name))
        if ended:
            logs = "\n".join(f"{self.log(name)}, its end:\n{_end_of(self.log(name))}" for name in ended)
            raise ClusterError(f"ended although the cluster needs them: {', '.join(ended)}\n{logs}")

    def stop(self, name: str) -> None:
        """Ends what was started under this name and whatever it started, at once. Returns when it is gone."""
        self._end(f"{_CLUSTER}={self._state}".encode(), f"{_PROCESS}={name}".encode())
        self._path(name).unlink(missing_ok=True)

    def stop_all(self) -> None:
        self._end(f"{_CLUSTER}={self._state}".encode())
        for path in self._records.glob("*.json"):
            path.unlink()

    def alive(self) -> tuple[int, ...]:
        """The ids of all processes that carry this cluster's mark."""
        return tuple(_marked(f"{_CLUSTER}={self._state}".encode()))

    def _end(self, *marks: bytes) -> None:
        # One that ends loses its memory, and with it its environment, before it gives its ports back.
        ending: dict[int, list[str]] = {}

        def all_gone() -> bool:
            # Again and again, because a process may have started another one since the last look.
            found = _marked(*marks)
            for pid in found:
                ending.setdefault(pid, _stat(f"{pid}")[19:20])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found and not any(_is_ending(pid, started) for pid, started in ending.items())

        wait_until(f"the end of the processes marked {marks[-1].decode()}", all_gone, 30)

    def _record(self, name: str) -> dict[str, Any] | None:
        """What `ensure` wrote, while that very process is alive."""
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
    """How much memory Go's programs may use instead of CPU time; a benchmark asks for more of it."""
    return {name: os.environ[name] for name in ("GOGC", "GOMEMLIMIT") if name in os.environ}


def carriers(variable: str) -> dict[int, str]:
    """The ids of all processes that have the variable in their environment, and its values. A zombie has none left."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            entries = (entry.partition(b"=") for entry in path.read_bytes().split(b"\0"))
            if values := [value for name, _, value in entries if name == variable.encode()]:
                found[int(path.parent.name)] = os.fsdecode(values[0])
    return found


def living_clusters() -> frozenset[Path]:
    """The folders of all local clusters of this machine that run, of whichever user and checkout."""
    return frozenset(Path(folder) for folder in carriers(_CLUSTER).values())


def child_of(pid: int) -> int | None:
    """The first child of a process; None when it has none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def _marked(*marks: bytes) -> list[int]:
    """The processes with all these entries in their environment. A zombie has none left."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if _carries(pid, *marks)]


def _carries(pid: int, *marks: bytes) -> bool:
    try:
        return set(marks) <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the process's start; None when there is no such process, or only its remains."""
    fields = _stat(f"{pid}")
    return None if not fields or fields[0] in "ZX" else fields[19]


def _is_ending(pid: int, started: list[str]) -> bool:
    """Whether a thread of the process that was started then is left; the first may be a zombie before the last ends."""
    threads = [_stat(f"{pid}/task/{path.name}") for path in Path(f"/proc/{pid}/task").glob("*")]
    # The number may be another process's by now.
    return _stat(f"{pid}")[19:20] == started and any(fields and fields[0] not in "ZX" for fields in threads)


def _stat(which: str) -> list[str]:
    """What the system says of a process or thread, from its state on; empty when there is none."""
    try:
        # The second field is the program's name in parentheses, which may hold spaces and parentheses.
        return Path(f"/proc/{which}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
