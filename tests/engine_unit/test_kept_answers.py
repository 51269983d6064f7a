"""Kept answers in the event loop of the test: the answers that a drain waits for, and the memory of request bodies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from rayloom_engine.front.http import body as body_module
from rayloom_engine.front.http.body_budget import BodyBudget
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.idempotency.answer_book import KeepLimits
from rayloom_engine.front.idempotency.kept_answers import Handler, KeptAnswers
from rayloom_engine.front.operations.lifecycle import Lifecycle
from rayloom_engine.front.operations.metrics import Metrics

MIB = 1024 * 1024


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> BodyBudget:
    """The budget of the test's bodies: 4 MiB."""
    budget = BodyBudget(4 * MIB)
    monkeypatch.setattr(body_module, "_BUDGET", budget)
    return budget


def kept_answers(lifecycle: Lifecycle | None = None, metrics: Metrics | None = None) -> KeptAnswers:
    return KeptAnswers(KeepLimits(), MIB, lifecycle or Lifecycle(), metrics or Metrics("tiny"))


def named_request(body: bytes, key: str = "order-66") -> Request:
    """A request with an Idempotency-Key, whose connection stays open."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json"), (b"idempotency-key", key.encode())],
        "state": {"tenant": "", "owner": "", "request_id": "r"},
    }
    return Request(scope, receive)


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition is true, for at most 1000 turns of the event loop."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("waited in vain")


async def hello(request: Request) -> Response:
    return Response(b"hello")


def test_a_drain_waits_for_a_client_that_still_reads_a_finished_answer() -> None:
    async def story() -> None:
        lifecycle = Lifecycle()
        response = await kept_answers(lifecycle).answer(named_request(b"{}"), hello)
        may_send = asyncio.Event()
        sent = b""

        async def send(message: Message) -> None:
            nonlocal sent
            await may_send.wait()
            sent += message.get("body", b"")

        sending = asyncio.create_task(response({"type": "http"}, named_request(b"").receive, send))
        for _ in range(20):  # more turns than the handler needs
            await asyncio.sleep(0)
        assert lifecycle.num_in_flight == 0
        assert not await lifecycle.wait_idle(0.0)
        may_send.set()
        assert await lifecycle.wait_idle(20.0)
        await sending
        assert sent == b"hello"

    asyncio.run(story())


def test_a_drain_waits_for_no_client_whose_answer_failed() -> None:
    async def refuse(request: Request) -> Response:
        raise ApiError(400, "no")

    async def story() -> None:
        lifecycle = Lifecycle()
        with pytest.raises(ApiError, match="no"):
            await kept_answers(lifecycle).answer(named_request(b"{}"), refuse)
        assert await lifecycle.wait_idle(0.0)

    asyncio.run(story())


def waiting(budget: BodyBudget, seen: list[int], go: asyncio.Event, *, takes_body: bool) -> Handler:
    """A handler that records the budget's bytes before and after it reads the body, and then waits for `go`."""

    async def handle(request: Request) -> Response:
        seen.append(budget.num_bytes)
        if takes_body:
            async for _ in request.stream():
                break
        seen.append(budget.num_bytes)
        await go.wait()
        return Response(b"done")

    return handle


@pytest.mark.parametrize("takes_body", [True, False])
def test_a_body_counts_in_the_budget_until_the_handler_takes_it_or_ends(budget: BodyBudget, takes_body: bool) -> None:
    async def story() -> None:
        answers, go = kept_answers(), asyncio.Event()
        seen: list[int] = []
        handler = waiting(budget, seen, go, takes_body=takes_body)
        answering = asyncio.create_task(answers.answer(named_request(bytes(MIB)), handler))
        await until(lambda: len(seen) == 2)
        assert seen == [MIB, 0 if takes_body else MIB]
        go.set()
        await answering
        await until(lambda: budget.num_bytes == 0)

    asyncio.run(story())


def test_the_memory_of_a_body_is_free_while_its_answer_and_a_repeat_are_awaited(budget: BodyBudget) -> None:
    async def story() -> None:
        answers, go = kept_answers(), asyncio.Event()
        body, same_body = bytes(MIB), bytes(MIB)
        num_references = [sys.getrefcount(body), sys.getrefcount(same_body)]
        seen: list[int] = []
        handler = waiting(budget, seen, go, takes_body=True)
        answering: list[asyncio.Task[Response]] = []
        for each in (body, same_body):
            answering.append(asyncio.create_task(answers.answer(named_request(each), handler)))
            del each
        await until(lambda: seen == [MIB, 0] and next(iter(answers._book._entries.values())).num_readers == 2)
        assert [sys.getrefcount(body), sys.getrefcount(same_body)] == num_references
        assert budget.num_bytes == 0
        go.set()
        await asyncio.gather(*answering)

    asyncio.run(story())


def test_a_key_with_another_body_leaves_nothing_in_the_budget(budget: BodyBudget) -> None:
    async def story() -> None:
        answers = kept_answers()
        await answers.answer(named_request(b"{}"), hello)
        with pytest.raises(ApiError, match="came before with another body"):
            await answers.answer(named_request(bytes(MIB)), hello)
        assert budget.num_bytes == 0

    asyncio.run(story())


def test_a_body_that_the_budget_refuses_is_a_counted_failure_and_leaves_nothing_there(budget: BodyBudget) -> None:
    async def story() -> None:
        metrics = Metrics("tiny")
        budget.share("", 0).take(4 * MIB)
        with pytest.raises(ApiError, match="too many large requests"):
            await kept_answers(metrics=metrics).answer(named_request(bytes(MIB)), hello)
        assert (metrics.failed.value(), budget.num_bytes) == (1, 4 * MIB)

    asyncio.run(story())
