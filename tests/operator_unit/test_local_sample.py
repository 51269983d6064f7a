"""The sample request in its thread: its time limit, its errors, and its end by a stop."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from rayloom_operator.local.sample import SampleRequest


class Silent:
    """A connection whose peer sends nothing. `show` reads until the connection ends."""

    def __init__(self) -> None:
        self.ends = socket.socketpair()
        self.is_read = threading.Event()
        self.is_over = threading.Event()

    def show(self, on_connect: Callable[[socket.socket], None]) -> None:
        on_connect(self.ends[0])
        self.is_read.set()
        assert self.ends[0].recv(1) == b""
        self.is_over.set()


@pytest.fixture
def silent():
    silent = Silent()
    yield silent
    for end in silent.ends:
        end.close()


def test_a_sample_without_an_answer_ends_at_its_limit(silent, capsys):
    then = threading.Event()
    SampleRequest(silent.show, then.set, limit_s=0.05).start()

    assert then.wait(20.0)
    assert silent.is_over.is_set()
    assert "The sample request takes longer than 0 s and is ended." in capsys.readouterr().err


def test_an_error_of_the_sample_is_reported_and_the_run_continues(capsys):
    def show(on_connect: object) -> None:
        raise ValueError("no such thing")

    then = threading.Event()
    SampleRequest(show, then.set).start()

    assert then.wait(20.0)
    assert "The sample request failed: ValueError: no such thing" in capsys.readouterr().err


def test_a_stop_ends_the_sample_at_once(silent):
    then = threading.Event()
    sample = SampleRequest(silent.show, then.set)
    sample.start()
    assert silent.is_read.wait(20.0)
    sample.cancel()

    assert silent.is_over.is_set()
    assert not then.is_set()
    sample.cancel()
