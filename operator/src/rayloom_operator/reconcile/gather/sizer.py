"""A thread that computes the parallelism of engines.

The time of a computation depends on the sizes in the model's configuration, which the model's author chooses. There is
one thread, so a long computation delays the computations of other services, but never the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rayloom_operator.errors import OperatorError

# A computation takes 10 ms of CPU time, but may have to wait for the CPU.
_LIMIT_S = 5.0

Computed = TypeVar("Computed")


class Sizer:
    """The sizing thread, and the calls that wait for a result. Not thread-safe itself: used in one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sizing")

    async def run(self, compute: Callable[..., Computed], *arguments: Any) -> Computed:
        """Returns `compute(*arguments)`. Raises the exceptions of `compute`, and OperatorError after 5 s.

        A lack of CPU time is no fault of the spec, so the next reconcile repeats the computation.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_LIMIT_S):
                return await loop.run_in_executor(self._thread, compute, *arguments)
        except TimeoutError as error:
            message = f"the shape of an engine was not computed within {_LIMIT_S:g} s: the operator has too little CPU"
            raise OperatorError(message) from error

    def close(self) -> None:
        """Starts no more computations."""
        self._thread.shutdown(wait=False, cancel_futures=True)
