"""WeightPacker: packs each matrix in a thread once all tensors of the matrix are read.

The loader copies the next tensors meanwhile, because copying and packing release the interpreter's lock. A plain matrix
is freed when it is packed, so a load never holds all matrices twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol


class PackedScheme(Protocol):
    """A matrix that is packed once all of its tensors are read: a WeightScheme, or a Matrix of the C library."""

    def destinations(self) -> Mapping[str, object]:
        """Returns the names of the tensors as keys. Called before `finish`."""

    def finish(self) -> None:
        """Packs the matrix. Called once."""


class WeightPacker:
    """Context manager that finishes each scheme of a model once, in the order in which schemes become complete."""

    def __init__(self, schemes: Iterable[PackedScheme]) -> None:
        # One thread, because neither the packing of the C library nor the allocation of its memory is thread-safe.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pack")
        self._schemes: dict[str, PackedScheme] = {}  # by tensor name
        self._missing: dict[PackedScheme, set[str]] = {}  # names of a scheme's tensors that are not read yet
        self._finishing: deque[Future[None]] = deque()  # calls of `finish`, oldest first, not yet checked for errors
        for scheme in schemes:
            names = scheme.destinations().keys()
            self._schemes.update(dict.fromkeys(names, scheme))
            self._missing[scheme] = set(names)
            if not names:
                self._finish(scheme)

    def __enter__(self) -> WeightPacker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until every complete scheme is finished. After an error, waits only for the scheme that is running."""
        self._thread.shutdown(wait=True, cancel_futures=error is not None)
        if error is None:
            assert not self._missing, "tensors of these schemes were not read"
            for finishing in self._finishing:
                finishing.result()

    def read(self, name: str) -> None:
        """Records that the tensor `name` is in place. Call this once for each tensor.

        The caller must not have a reference to the tensor any more. If `finish` of an earlier scheme has failed, this
        method raises its error, because the remaining tensors may take minutes to load.
        """
        while self._finishing and self._finishing[0].done():
            self._finishing.popleft().result()
        scheme = self._schemes.get(name)
        if scheme is None:  # a tensor outside the linear layers
            return
        missing = self._missing[scheme]
        missing.remove(name)
        if not missing:
            self._finish(scheme)

    def _finish(self, scheme: PackedScheme) -> None:
        del self._missing[scheme]
        self._finishing.append(self._thread.submit(scheme.finish))
