"""The supervisor's decisions and refusals. That it restarts and stops real processes is in engine_real/."""

from __future__ import annotations

import socket

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
