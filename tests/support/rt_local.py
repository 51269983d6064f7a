"""Runs `rayloom-operator local` as a process, with the fake engine instead of `rayloom-engine`."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path

from rt_warm_python import warm_python

FAKE_ENGINE = Path(__file__).with_name("rt_fake_engine.py")
DEADLINE_S = 120.0


def install_fake_engine(folder: Path) -> Path:
    """Puts a command `rayloom-engine` into a new folder `bin`. Returns the path of a Python beside it."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    command = bin_folder / "rayloom-engine"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE_ENGINE}" "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return bin_folder / "python"


def write_manifest(folder: Path, environment: dict[str, str], spec: str = "") -> Path:
    """A manifest whose engine gets `environment`. `spec`: further lines of its spec."""
    path = folder / "service.yaml"
    lines = [
        "apiVersion: rayloom.dev/v1alpha1",
        "kind: LLMService",
        "metadata: {name: tiny}",
        "spec:",
        "  model: {source: 'builtin://smollm2-135m'}",
        "  engine:",
        "    env:",
        *(f"    - {{name: {name}, value: '{value}'}}" for name, value in environment.items()),
        "    - {name: LAST, value: ''}",
        spec,
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


class Local:
    """A running `rayloom-operator local`. `output`: its output so far. `folder`: the folder of its temporary files."""

    def __init__(self, folder: Path, manifest: Path, *flags: str, python: Path | None = None) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.output = ""
        arguments = ["local", "-f", manifest, "--port", "0", "--admin-port", "0", *flags]
        output, theirs = os.pipe()
        self._output = output
        # `local` looks for the engine beside sys.executable. So sys.executable is here a Python beside the fake engine.
        self._process = warm_python("rayloom_operator.__main__").start(
            "rayloom_operator.__main__:main",
            arguments,
            environment={**os.environ, "TMPDIR": str(self.temporary)},
            executable=python or install_fake_engine(folder),
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with open(self._output, "rb", buffering=0) as stream:
            while piece := stream.read(65536):
                self.output += piece.decode()

    def wait_for(self, text: str) -> None:
        """Returns once `text` was printed. Fails with the output at the deadline, or if the process ends first."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.output:
            is_over = self._process.poll() is not None and not self._reader.is_alive()
            assert not is_over or text in self.output, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {DEADLINE_S} s:\n{self.output}"
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def exit_code(self) -> int:
        """Waits for the end, and returns the exit code. After that, `output` is complete."""
        code = self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return code

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def is_alive(pid: int) -> bool:
    """True if a process runs. A zombie, which has ended and waits for its parent, does not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def wait_until_gone(*pids: int) -> None:
    """Returns once none of the processes runs. Fails if one still runs at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still running after {DEADLINE_S} s: {alive}"
        time.sleep(0.02)
