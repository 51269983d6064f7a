"""Tests that mostly wait: those of a module run at once, each in a thread. `scene` makes a test of the function of one.

A module of scenes has a fixture `stage`, made by `staged`, which starts all of the module's selected scenes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

_T = TypeVar("_T")
_scenes: dict[tuple[str, str], Callable[[Any], None]] = {}  # module and name of a scene -> its function


def scene(play: Callable[[_T], None]) -> Callable[[Stage], None]:
    """A test with the name of `play` that waits for the end of `play`, which runs on the stage."""
    _scenes[play.__module__, play.__name__] = play

    def test(stage: Stage) -> None:
        stage.result(play.__name__)

    test.__name__ = test.__qualname__ = play.__name__
    test.__module__ = play.__module__
    return test


class Stage:
    """Scenes that run, at most `num_at_once` of them at a time."""

    def __init__(self, num_at_once: int) -> None:
        self._threads = ThreadPoolExecutor(max_workers=num_at_once)
        self._plays: dict[str, Future[None]] = {}

    def start(self, name: str, play: Callable[[_T], None], setting: _T) -> None:
        self._plays[name] = self._threads.submit(play, setting)

    def result(self, name: str) -> None:
        """Waits for the end of the scene, and raises its exception."""
        self._plays[name].result()

    def close(self) -> None:
        """Waits for the end of all scenes."""
        self._threads.shutdown()


@contextmanager
def staged(request: pytest.FixtureRequest, set_up: Callable[[int], _T], num_at_once: int) -> Iterator[Stage]:
    """A stage with the selected scenes of the module, in order. `set_up(number)` returns the argument of a scene."""
    module = request.module.__name__
    items = [item for item in request.session.items if item.path == request.path]
    stage = Stage(num_at_once)
    try:
        for number, item in enumerate(item for item in items if (module, item.name) in _scenes):
            stage.start(item.name, _scenes[module, item.name], set_up(number))
        yield stage
    finally:
        stage.close()
