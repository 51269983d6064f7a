"""Runs commands and waits for conditions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from local_kubernetes.machine.place import INDICES, Place

# Time limit to build an image or a part of Kubernetes, even at the lowest priority beside busy tests, as in .ci/run.
BUILD_S = 3600.0
# Time limit for a program of the cluster to start, answer or end. An idle machine needs only seconds.
PROGRAM_S = 300.0
_NUM_SHOWN_LINES = 30
# Pause between two checks of a condition.
_PAUSE_S = 0.1


class ClusterError(Exception):
    """The test cluster cannot do what a command needs; the message names the problem and its solution."""


class CommandTimeout(ClusterError):
    """A command did not end in time and was killed."""


def run(*command: object, stdin: bytes | None = None, timeout_s: float = 120) -> str:
    """The command's standard output. Raises ClusterError with the output's end when it fails or takes too long."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, env=_without_proxy(), timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise ClusterError(f"there is no command {words[0]!r} on PATH") from None
    except subprocess.TimeoutExpired:
        raise CommandTimeout(f"{' '.join(words)} did not end within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        output = (done.stdout + done.stderr).decode(errors="replace")
        shown = "\n".join(output.splitlines()[-_NUM_SHOWN_LINES:])
        raise ClusterError(f"{' '.join(words)} ended with code {done.returncode}:\n{shown}")
    return done.stdout.decode(errors="replace")


def start(*command: object) -> subprocess.Popen[str]:
    """A running command with pipes to its stdin and from its stdout; its stderr is discarded."""
    words = [str(word) for word in command]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=_without_proxy(), text=True, bufsize=1
    )


def run_shown(*command: object, env: Mapping[str, str] | None = None, timeout_s: float = 1500) -> None:
    """Runs a long command that prints to our own output. Raises ClusterError when it fails or takes too long."""
    words = [str(word) for word in command]
    sys.stdout.flush()
    try:
        code = subprocess.run(words, stdin=subprocess.DEVNULL, env=env, timeout=timeout_s, check=False).returncode
    except FileNotFoundError:
        raise ClusterError(f"there is no command {words[0]!r} on PATH") from None
    except subprocess.TimeoutExpired:
        raise CommandTimeout(f"{' '.join(words)} did not end within {timeout_s:.0f} s") from None
    if code != 0:
        raise ClusterError(f"{' '.join(words)} ended with code {code}")


def _without_proxy() -> dict[str, str]:
    """Our environment, with the cluster's addresses exempt from any proxy of this machine."""
    direct = ",".join(["127.0.0.1", "localhost", *(Place.of(index).bridge_ip for index in INDICES)])
    return os.environ | {
        name: f"{os.environ[name]},{direct}" if os.environ.get(name) else direct for name in ("NO_PROXY", "no_proxy")
    }


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Prints the name of a stage, and its seconds at the end."""
    start = time.monotonic()
    say(f"{name} ...")
    yield
    say(f"{name}: {time.monotonic() - start:.1f} s")


def wait_until(what: str, is_so: Callable[[], bool], timeout_s: float, hint: str = "") -> None:
    """Returns once `is_so()` is true. After `timeout_s` seconds, raises a ClusterError with `what` and `hint`."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:.0f} s for {what}" + (f"; {hint}" if hint else ""))
        time.sleep(_PAUSE_S)
