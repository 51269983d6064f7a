"""The memory of bodies: tenants share it, a body holds its part until parsed, and tenants take turns in parsing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayloom_engine.front.http import body
from rayloom_engine.front.http.body_budget import FREE_BYTES, BodyBudget
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.http.turns import Turns
from rt_front import FrontUnderTest, running_front

KIB = 1024
MIB = 1024 * KIB


def held(budget: BodyBudget, tenant: str, num_bytes: int, times: int = 99) -> int:
    """Returns the number of bodies of this size that the tenant can hold in addition to the held bodies."""
    for number in range(times):
        try:
            budget.share(tenant, 0).take(num_bytes)
        except ApiError as error:
            assert (error.status, error.code) == (503, "too_many_bodies")
            return number
    return times


def test_each_tenant_gets_half_of_the_rest() -> None:
    budget = BodyBudget(128 * MIB)
    assert [held(budget, tenant, 8 * MIB) for tenant in "abcde"] == [8, 4, 2, 1, 0]
    assert budget.num_bytes == 120 * MIB


def test_without_keys_the_one_tenant_may_hold_all() -> None:
    assert held(BodyBudget(128 * MIB), "", 8 * MIB) == 16


def test_small_bodies_are_never_refused_and_take_nothing() -> None:
    budget = BodyBudget(MIB)
    budget.share("", 0).take(MIB)
    small = budget.share("a", 0)
    for _ in range(2):
        small.take(FREE_BYTES // 2)
    assert budget.num_bytes == MIB
    with pytest.raises(ApiError, match="too many large requests are being read"):
        small.take(1)


def test_a_share_is_given_back_whole() -> None:
    budget = BodyBudget(MIB)
    with budget.share("a", 0) as share:
        share.take(FREE_BYTES)
        assert budget.num_bytes == 0
        share.take(1)
        assert budget.num_bytes == FREE_BYTES + 1, "from here on the whole body counts"
        with contextlib.suppress(ApiError), budget.share("a", 0) as other:
            other.take(2 * MIB)
    assert budget.num_bytes == 0
    assert not budget._tenant_to_bytes, "a tenant that holds nothing is forgotten"


def test_a_server_of_larger_bodies_has_room_for_four() -> None:
    budget = BodyBudget(MIB)
    shares: list[Any] = [budget.share("", 4 * MIB) for _ in range(5)]
    for share in shares[:4]:
        share.take(MIB)
    with pytest.raises(ApiError):
        shares[4].take(MIB)


def test_the_lock_is_served_round_robin_by_tenant() -> None:
    async def scenario() -> list[str]:
        turns = Turns()
        order = []
        go = asyncio.Event()

        async def work(name: str) -> None:
            async with turns.turn(name[0]):
                order.append(name)
                await go.wait()

        tasks = [asyncio.create_task(work(name)) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")]
        await asyncio.sleep(0)
        tasks[1].cancel()  # a2 is cancelled while it waits
        go.set()
        await asyncio.wait(tasks)
        async with asyncio.timeout(60.0), turns.turn("a"):
            return order

    assert asyncio.run(scenario()) == ["a1", "b1", "a3", "c1", "b2", "a4"]


def test_a_waiter_cancelled_as_it_gets_the_lock_hands_it_on() -> None:
    async def scenario() -> None:
        turns = Turns()

        async def work() -> None:
            async with turns.turn("a"):
                pass

        async with turns.turn("a"):
            waiter = asyncio.create_task(work())
            await asyncio.sleep(0)
        waiter.cancel()  # the waiter owns the lock already, but has not run since it got the lock
        await asyncio.wait([waiter])
        async with asyncio.timeout(60.0), turns.turn("b"):
            pass

    asyncio.run(scenario())


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path, api_keys=("k1", "k2")) as front:
        yield front


def complete(front: FrontUnderTest, key: str, prompt: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{front.api_url}/v1/completions", json={"prompt": prompt}, headers=headers, timeout=60.0)


def test_a_key_that_fills_its_part_leaves_room_for_others(
    front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = BodyBudget(4 * MIB)
    monkeypatch.setattr(body, "_BUDGET", budget)
    front.do(lambda: object.__setattr__(front.service.config, "max_body_bytes", MIB))
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer k1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {MIB}\r\n\r\n"
    ).encode()
    host, port = front.api_url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for number in range(2):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=20.0))
            connection.sendall(head + b" " * (MIB - 2))
            front.wait_until(lambda most=(number + 1) * (MIB - 2): budget.num_bytes == most, "the bytes are there")
        refused = complete(front, "k1", "a" * 100 * KIB)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_bodies")
        for key in ("k1", "k2"):
            assert complete(front, key, "Hi").status_code == 200, "small bodies are always read"
        large = complete(front, "k2", "a" * 700 * KIB)
        assert (large.status_code, large.json()["error"]["code"]) == (400, "context_length_exceeded"), "it was read"
    front.wait_until(lambda: budget.num_bytes == 0, "all is given back")


def test_a_body_counts_until_it_is_parsed(front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = BodyBudget(128 * MIB)
    parses = threading.Event()
    parse_object = body.parse_object

    def parse(data: bytes) -> dict[str, Any]:
        assert parses.wait(20.0)
        return parse_object(data)

    monkeypatch.setattr(body, "_BUDGET", budget)
    monkeypatch.setattr(body, "parse_object", parse)
    threads = [threading.Thread(target=complete, args=(front, "k1", "a" * 300 * KIB)) for _ in range(3)]
    for thread in threads:
        thread.start()
    front.wait_until(lambda: budget.num_bytes > 900 * KIB, "one is parsed and two wait for it")
    parses.set()
    for thread in threads:
        thread.join(60.0)
    front.wait_until(lambda: budget.num_bytes == 0, "all is given back")
