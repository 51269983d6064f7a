"""A thread for what is computed with a model's sizes, which the model's author has chosen.

One thread, so that a computation that takes long delays those of other services, and never the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rayloom_operator.errors import OperatorError

# A shape is computed within 10 ms of a core, which others may have.
_LIMIT_S = 5.0

Computed = TypeVar("Computed")


class Sizer:
    """Lives in one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sizing")

    async def run(self, compute: Callable[..., Computed], *arguments: Any) -> Computed:
        """`compute(*arguments)`. Raises what it raises, and OperatorError when it takes longer than 5 s.

        The spec is not at fault then: the same computation is tried again.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_LIMIT_S):
                return await loop.run_in_executor(self._thread, compute, *arguments)
        except TimeoutError as error:
            words = f"the shape of an engine was not computed within {_LIMIT_S:g} s: the operator has too little CPU"
            raise OperatorError(words) from error

    def close(self) -> None:
        """Begins no more computations."""
        self._thread.shutdown(wait=False, cancel_futures=True)
