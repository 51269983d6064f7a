"""Runs tests of a module in parallel threads, because tests mostly wait. `parallel_test` decorates these tests.

The module has a fixture `started_tests`, made by `parallel_tests`, which starts all selected tests of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

_T = TypeVar("_T")
_bodies: dict[tuple[str, str], Callable[[Any], None]] = {}  # module and name of a test -> its function


def parallel_test(body: Callable[[_T], None]) -> Callable[[ParallelTests], None]:
    """Returns a test with the name of `body`. The test waits until `body` has ended in its thread."""
    _bodies[body.__module__, body.__name__] = body

    def test(started_tests: ParallelTests) -> None:
        started_tests.result(body.__name__)

    test.__name__ = test.__qualname__ = body.__name__
    test.__module__ = body.__module__
    return test


class ParallelTests:
    """The running tests of a module, at most `num_at_once` at a time."""

    def __init__(self, num_at_once: int) -> None:
        self._threads = ThreadPoolExecutor(max_workers=num_at_once)
        self._running: dict[str, Future[None]] = {}

    def start(self, name: str, body: Callable[[_T], None], setting: _T) -> None:
        self._running[name] = self._threads.submit(body, setting)

    def result(self, name: str) -> None:
        """Waits for the end of the test `name`, and raises its exception if it has failed."""
        self._running[name].result()

    def close(self) -> None:
        """Waits for the end of all tests."""
        self._threads.shutdown()


@contextmanager
def parallel_tests(
    request: pytest.FixtureRequest, set_up: Callable[[int], _T], num_at_once: int
) -> Iterator[ParallelTests]:
    """Starts the selected tests of the module, in order. `set_up(number)` returns the argument of a test."""
    module = request.module.__name__
    items = [item for item in request.session.items if item.path == request.path]
    tests = ParallelTests(num_at_once)
    try:
        for number, item in enumerate(item for item in items if (module, item.name) in _bodies):
            tests.start(item.name, _bodies[module, item.name], set_up(number))
        yield tests
    finally:
        tests.close()
