"""Requests whose forms are being checked: a drain waits for them, tenants take turns, and their number is limited.

llguidance is replaced by a check that lasts until the test ends it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rayloom_engine.errors import QueueFull
from rayloom_engine.front.operations.form_checks import MAX_WAITING, FormChecks
from rayloom_engine.grammar import validate as validation
from rt_front import FrontUnderTest, running_front

FORM = {"choice": ["yes", "no"]}


class SlowChecks:
    """A replacement for llguidance: each check waits for `end`, and returns no warnings."""

    def __init__(self) -> None:
        self.grammars: list[str] = []  # grammars in the order of their checks
        self.begun = threading.Event()
        self.end = threading.Event()

    def asked(self, grammar: str) -> tuple[str, ...]:
        self.grammars.append(grammar)
        self.begun.set()
        assert self.end.wait(20.0)
        return ()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowChecks]:
    checks = SlowChecks()
    monkeypatch.setattr(validation, "_asked", checks.asked)
    monkeypatch.setattr(validation, "_known", {})
    yield checks
    checks.end.set()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front"), max_queued_requests=8, max_num_seqs=1) as front:
        yield front


def test_a_drain_waits_for_a_request_whose_form_is_being_checked(front: FrontUnderTest, checks: SlowChecks) -> None:
    lifecycle = front.service.lifecycle
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(front.chat, structured_outputs=FORM)
        try:
            assert checks.begun.wait(20.0)
            front.do(lambda: lifecycle.drain(True))
            assert not front.run(lifecycle.wait_idle(0.0))
        finally:
            checks.end.set()
            response = answer.result(60.0)
            front.do(lambda: lifecycle.drain(False))
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "Hello there."
    assert front.run(lifecycle.wait_idle(20.0))


def test_a_request_without_room_is_refused_before_its_form_is_checked(
    front: FrontUnderTest, checks: SlowChecks
) -> None:
    checks.end.set()
    refused = front.chat(structured_outputs=FORM, n=9)
    assert refused.status_code == 400
    assert "9 choices" in refused.json()["error"]["message"]
    assert checks.grammars == []
    assert front.do(lambda: front.service.lifecycle.num_in_flight) == 0


def test_a_form_that_cannot_be_enforced_leaves_nothing_in_flight(
    front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_asked", lambda _grammar: "no such form")
    monkeypatch.setattr(validation, "_known", {})
    refused = front.chat(structured_outputs=FORM)
    assert refused.status_code == 400
    assert "cannot be enforced: no such form" in refused.json()["error"]["message"]
    assert front.do(lambda: front.service.lifecycle.num_in_flight) == 0


async def waiting_checks(checks: FormChecks, tenant: str, count: int) -> list[asyncio.Task[tuple[str, ...]]]:
    tasks = [asyncio.create_task(checks.check(f"{tenant}{number}", "form", tenant)) for number in range(count)]
    await asyncio.sleep(0)  # each task runs until it waits
    return tasks


def test_more_new_forms_than_may_wait_are_refused_as_a_full_queue(front: FrontUnderTest, checks: SlowChecks) -> None:
    tasks = front.run(waiting_checks(front.service.form_checks, "", MAX_WAITING))

    async def all_checked() -> list[tuple[str, ...]]:
        return await asyncio.gather(*tasks)

    try:
        refused = front.chat(structured_outputs=FORM)
    finally:
        checks.end.set()
        verdicts = front.run(all_checked())
    assert verdicts == [()] * MAX_WAITING
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"] == "1"
    assert "64 other forms of answers are being checked" in refused.json()["error"]["message"]
    assert front.chat(structured_outputs=FORM).status_code == 200


def test_equal_forms_wait_together_and_tenants_take_turns(checks: SlowChecks) -> None:
    async def ask() -> None:
        forms = FormChecks()
        tasks = await waiting_checks(forms, "a", MAX_WAITING)
        tasks += await waiting_checks(forms, "b", 2)
        tasks.append(asyncio.create_task(forms.check("a1", "form", "a")))
        with pytest.raises(QueueFull, match="64 other forms of answers of this API key are being checked"):
            await forms.check("another", "form", "a")
        checks.end.set()
        await asyncio.gather(*tasks)

    asyncio.run(ask())
    assert checks.grammars[:5] == ["a0", "b0", "a1", "b1", "a2"]
    assert len(checks.grammars) == MAX_WAITING + 2, "no grammar is checked twice"
