"""Fixtures of several test files of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from rt_fake_rank import Ranks


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks of a pool. Their hang_seconds are 5, or the parameter of the test."""
    with contextlib.closing(Ranks(getattr(request, "param", 5.0))) as ranks:
        yield ranks
