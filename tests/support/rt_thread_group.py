"""ThreadGroup: the ranks of a stage as threads of one process, for tests of their sums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")
_WAIT_S = 60.0  # only if a rank has failed


class ThreadGroup:
    """Implements TensorGroup for one of the threads. The sums are in the order of the ranks."""

    def __init__(self, index: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self._index = index
        self._parts = parts
        self._barrier = barrier

    def all_reduce(self, part: Any) -> Any:
        self._parts[self._index] = part
        self._barrier.wait(_WAIT_S)
        total = sum(self._parts[1:], start=self._parts[0])
        self._barrier.wait(_WAIT_S)  # until all ranks have read the parts
        return total

    def gather(self, part: Any) -> Any:
        raise AssertionError("a test joins the logits of the ranks itself")


def on_ranks(ranks: Sequence[Callable[[ThreadGroup], Result]]) -> list[Result]:
    """The results of the ranks, which run at the same time. Each gets its group."""
    parts: list[Any] = [None] * len(ranks)
    barrier = threading.Barrier(len(ranks))
    with ThreadPoolExecutor(len(ranks)) as threads:
        futures = [threads.submit(rank, ThreadGroup(index, parts, barrier)) for index, rank in enumerate(ranks)]
        return [future.result() for future in futures]
