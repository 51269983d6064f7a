"""Faults caused from outside: signals, and code that is loaded into a server's ranks. The engine has no fault hooks."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rt_server import RunningServer, running_server

_SITE = '''
import importlib.abc, importlib.util, sys

class Patch(importlib.abc.MetaPathFinder):
    """Changes what it is about once its module is there; nobody imports torch because of it."""

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            patch(getattr(module, NAME))

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Patch())
'''

_RUNNER = ("rayloom_engine.worker.runner", "Runner")
_SLOW_STEP_S = 0.2
_SLOW_OR_STUCK = """
import os, time

def patch(runner):
    run = runner.run

    def slow_or_stuck(self, plan):
        if os.path.exists({slow!r}):
            time.sleep({slow_step_s})
        try:
            with open({stuck!r}) as flag:
                is_meant = int(flag.read()) == self.part.rank_in(self.part.stage.index)
        except (OSError, ValueError):
            is_meant = False
        if is_meant:
            os.unlink({stuck!r})
            while True:
                time.sleep(1.0)
        return run(self, plan)

    runner.run = slow_or_stuck
"""


@contextlib.contextmanager
def patched(folder: Path, code: str, target: tuple[str, str] = _RUNNER) -> Iterator[None]:
    """Ranks that start within the block first call `code`'s function `patch(Runner)`.

    Python loads `code` as `sitecustomize`, from a new folder in `folder`. `target`: the module and the name of the
    object that `patch` gets. Every process that imports this module calls `patch`.
    """
    plugin = folder / "plugin"
    plugin.mkdir()
    (plugin / "sitecustomize.py").write_text(f"MODULE, NAME = {target!r}\n{code}{_SITE}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(plugin), prepend=os.pathsep)
        yield


@contextlib.contextmanager
def patched_server(
    folder: Path, code: str, *arguments: str, target: tuple[str, str] = _RUNNER
) -> Iterator[RunningServer]:
    """A server that starts in a block of `patched`."""
    with patched(folder, code, target), running_server(folder, *arguments) as server:
        yield server


def breakable(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Ranks that start within the block can be "stuck", and slow by `slow_steps`."""
    flags = {"stuck": str(_stuck_flag(folder)), "slow": str(_slow_flag(folder))}
    return patched(folder, _SLOW_OR_STUCK.format(**flags, slow_step_s=_SLOW_STEP_S))


@contextlib.contextmanager
def breakable_server(folder: Path, *arguments: str) -> Iterator[RunningServer]:
    """A server in which `strike` can cause every fault."""
    with breakable(folder), running_server(folder, *arguments) as server:
        yield server


@contextlib.contextmanager
def slow_steps(folder: Path) -> Iterator[None]:
    """Within the block, every step of the ranks of `breakable(folder)` takes 0.2 s longer.

    A test that acts at an early token may have to wait for a CPU for seconds. With usual steps the test could then be
    too late. With slow steps, streams of 64 tokens are long enough for such a test.
    """
    flag = _slow_flag(folder)
    flag.touch()
    try:
        yield
    finally:
        flag.unlink()


def aim(server: RunningServer, victim: str, fault: str) -> Callable[[], None]:
    """Finds the present process of "rank N", "core", "launcher" or "front". Returns a function that causes the fault.

    The fault is "killed" or "stopped", and for ranks also "stuck". A stuck rank sends heartbeats, but never ends its
    step.
    """
    if fault == "stuck":
        flag, number = _stuck_flag(server.log.parent), victim.removeprefix("rank ")
        return lambda: _write(flag, number)
    ranks = {f"rank {rank['rank']}": rank["pid"] for rank in server.status()["ranks"]}
    pid = ranks[victim] if victim in ranks else server.children()[victim].pid
    return lambda: os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)


def strike(server: RunningServer, victim: str, fault: str) -> None:
    """Finds the victim and causes the fault. Finding it takes a moment on a busy machine."""
    aim(server, victim, fault)()


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def outlive_supervisor(server: RunningServer) -> list[psutil.Process]:
    """Kills only the server's supervisor. Returns the server's processes that still run after 50 s."""
    supervisor = psutil.Process(server.process.pid)
    family = [supervisor, *supervisor.children(recursive=True)]
    for process in family:
        if process.name() == "raylet":
            # Ray's shutdown gives the raylet one second to record that it ends on purpose. If the raylet takes longer,
            # as on a busy machine, Ray's agents try for 60 s to report a fault. A suspended raylet always takes longer.
            # So the agents end in time only because `local_ray` kills them.
            process.suspend()
    server.process.kill()
    return psutil.wait_procs(family, timeout=50.0)[1]


def _stuck_flag(folder: Path) -> Path:
    """The path of the file with the number of the rank that is to be stuck. That rank deletes the file."""
    return folder / "stuck"


def _slow_flag(folder: Path) -> Path:
    """The path of the file that exists while steps are slow."""
    return folder / "slow"
