"""The supervisor's decisions and refusals. That it restarts and stops real processes is in engine_real/."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from rayloom_engine.config import parse_config
from rayloom_engine.errors import ConfigError
from rayloom_engine.restarts import backoff_seconds
from rayloom_engine.supervisor import Child, bind_sockets


def test_the_first_restart_is_immediate_and_later_ones_wait_longer() -> None:
    assert [backoff_seconds(num) for num in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_the_budget_counts_deaths_of_the_last_ten_minutes() -> None:
    child = Child("core", budget=2)
    assert [child.died(now) for now in (0.0, 100.0, 200.0)] == [True, True, False]
    child = Child("core", budget=2)
    assert [child.died(now) for now in (0.0, 100.0, 601.0, 702.0)] == [True, True, True, True]


def test_a_death_sets_when_to_start_again() -> None:
    child = Child("core", budget=5)
    child.died(100.0)
    assert child.start_at == 100.0
    child.died(101.0)
    assert child.start_at == 101.5


def test_a_taken_port_is_named_with_its_field() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"admin_port: cannot listen on 127.0.0.1:{port}: .*choose another one"):
            bind_sockets(parse_config({"port": 0, "admin_port": port}))


def test_an_admin_port_that_others_can_reach_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="admin_token_file must be set"):
        bind_sockets(parse_config({"port": 0, "admin_port": 0, "admin_host": "0.0.0.0"}))


@pytest.fixture
def heard() -> Iterator[tuple[Child, Callable[[bytes], int]]]:
    """A child, and how it is heard."""
    listening, speaking = os.pipe()
    os.set_blocking(listening, False)
    child = Child("core", budget=5)
    child.started(subprocess.Popen([sys.executable, "-c", ""]), listening)
    yield child, lambda data: os.write(speaking, data)
    assert child.process is not None
    child.process.wait()
    os.close(speaking)
    os.close(listening)


def test_a_child_that_fell_silent_is_known_after_hang_seconds(heard: tuple[Child, Callable[[bytes], int]]) -> None:
    child, say = heard
    assert not child.is_silent(1000.0, 10.0, was_away=False), "one that was never heard is still starting"
    say(b"011")
    assert not child.is_silent(1001.0, 10.0, was_away=False)
    assert not child.is_silent(1011.0, 10.0, was_away=False)
    assert child.is_silent(1011.1, 10.0, was_away=False)
    say(b"1")
    assert not child.is_silent(1011.2, 10.0, was_away=False)


def test_a_child_that_was_up_is_started_again_at_once(heard: tuple[Child, Callable[[bytes], int]]) -> None:
    child, say = heard
    process = child.process
    say(b"1")
    child.is_silent(1000.0, 10.0, was_away=False)
    assert [child.died(1000.0), child.died(1001.0)] == [True, True]
    assert child.start_at == 1001.0
    child.process = process


def test_a_child_that_is_not_up_has_longer(heard: tuple[Child, Callable[[bytes], int]]) -> None:
    child, say = heard
    say(b"00")
    assert not child.is_silent(1000.0, 10.0, was_away=False)
    assert not child.is_silent(1059.0, 10.0, was_away=False)
    assert child.is_silent(1061.0, 10.0, was_away=False)


def test_a_supervisor_that_was_stopped_blames_nobody(heard: tuple[Child, Callable[[bytes], int]]) -> None:
    child, say = heard
    say(b"1")
    assert not child.is_silent(1000.0, 10.0, was_away=False)
    assert not child.is_silent(1060.0, 10.0, was_away=True)
    assert not child.is_silent(1069.0, 10.0, was_away=False)
    assert child.is_silent(1071.0, 10.0, was_away=False)
