"""The packing of matrices during a load: each matrix is packed once, as soon as its tensors are read."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rayloom_engine.layers.destination import Destination
from rayloom_engine.models.weight_packer import WeightPacker

WAIT_S = 30.0


class Recorded:
    """A scheme for tensors with these names. It records calls of `finish`, which may fail."""

    def __init__(self, *names: str, error: Exception | None = None) -> None:
        self.num_finished = 0
        self.finished = threading.Event()
        self._names = names
        self._error = error

    num_bytes = 0

    def destinations(self) -> dict[str, Destination]:
        return {name: Destination(torch.empty(1)) for name in self._names}

    def finish(self) -> None:
        self.num_finished += 1
        self.finished.set()
        if self._error is not None:
            raise self._error

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_matrix_is_finished_once_when_its_last_tensor_is_read() -> None:
    fused, other, tied = Recorded("q", "k"), Recorded("o"), Recorded()
    with WeightPacker([fused, other, tied]) as packer:
        assert tied.finished.wait(WAIT_S), "a scheme without tensors is complete from the start"
        packer.read("q")
        packer.read("norm")
        packer.read("o")
        assert other.finished.wait(WAIT_S)
        assert fused.num_finished == 0
        packer.read("k")
    assert [each.num_finished for each in (fused, other, tied)] == [1, 1, 1]


def test_an_error_while_packing_reaches_the_loader() -> None:
    with (
        pytest.raises(MemoryError, match="no room"),
        WeightPacker([Recorded("o", error=MemoryError("no room"))]) as packer,
    ):
        packer.read("o")


def test_an_error_while_packing_ends_the_load_before_its_last_tensor() -> None:
    late = Recorded("k")
    with (
        pytest.raises(MemoryError, match="no room"),
        WeightPacker([Recorded("o", error=MemoryError("no room")), late]) as packer,
    ):
        packer.read("o")
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            packer.read("norm")
        pytest.fail("the loader reads on")
    assert late.num_finished == 0


def test_an_error_while_reading_is_not_hidden_by_matrices_that_were_not_read() -> None:
    missing = Recorded("o")
    with pytest.raises(OSError, match="the disk"), WeightPacker([missing]):
        raise OSError("the disk")
    assert missing.num_finished == 0
