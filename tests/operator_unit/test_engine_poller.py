"""The poller against a server on loopback: an engine is polled again after any answer, and changes are reported."""

import asyncio
import json

import pytest
from aiohttp import web

from rayloom_operator.observe import poller as engine_poller
from rayloom_operator.observe.poller import Target, serving_interval_s
from rt_poller import GOOD, KEY, Counted, polled, until


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xff\xfe not text", "JSON"),
        (b"[" * 100_000, ""),
        (json.dumps(GOOD | {"last_token_age_seconds": "1"}).encode(), "last_token_age_seconds"),
        (json.dumps(GOOD | {"ranks": [{}]}).encode(), "ranks.0.node"),
        (b"x" * 2_000_000, "more than"),
    ],
)
def test_garbage_is_a_failed_answer_and_the_engine_is_polled_again(monkeypatch, body, words):
    async def run():
        answers = [body, json.dumps(GOOD).encode()]

        async def answer(request):
            assert request.headers["Authorization"] == "Bearer secret"
            return web.Response(body=answers[0])

        async with polled(monkeypatch, answer) as (poller, news):
            await until(lambda: news)
            reading = poller.reading(KEY, "chat-0")
            assert reading.status is None and reading.failing_since is not None
            assert words in reading.error
            answers.pop(0)
            await until(lambda: poller.reading(KEY, "chat-0").failing_since is None)
            assert poller.reading(KEY, "chat-0").status.nodes == ("n1",)

    asyncio.run(run())


def test_a_redirect_is_not_followed(monkeypatch):
    async def run():
        paths = []

        async def answer(request):
            paths.append(request.path)
            return web.Response(status=302, headers={"Location": "/elsewhere"})

        async with polled(monkeypatch, answer) as (poller, _):
            await until(lambda: poller.num_failures > 1)
            assert set(paths) == {"/status"}
            assert "302" in poller.reading(KEY, "chat-0").error

    asyncio.run(run())


def test_another_pod_at_the_same_address_is_another_engine(monkeypatch):
    async def run():
        async def answer(request):
            return web.json_response(GOOD)

        async with polled(monkeypatch, answer) as (poller, _):
            await until(lambda: poller.reading(KEY, "chat-0"))
            poller.follow(KEY, {"chat-0": Target("127.0.0.1", "secret", "uid-2")})
            assert poller.reading(KEY, "chat-0") is None
            await until(lambda: poller.reading(KEY, "chat-0"))
            poller.follow(KEY, {})
            assert poller.reading(KEY, "chat-0") is None

    asyncio.run(run())


def test_elapsed_seconds_are_no_event(monkeypatch):
    async def run():
        def say(number):
            return GOOD | {"state": "recovering", "reason": f"rank 0 has not advanced for {60 + number} s"}

        engine = Counted(say)
        async with polled(monkeypatch, engine.answer) as (_, news):
            await until(lambda: engine.num > 5)
            assert news == [KEY]

    asyncio.run(run())


def test_the_end_of_a_drain_is_an_event_and_fewer_requests_are_not(monkeypatch):
    async def run():
        requests, count = {"in_flight": 3, "running": 2, "waiting": 1}, 0

        async def answer(request):
            nonlocal count
            count += 1
            return web.json_response(GOOD | {"state": "draining", "requests": dict(requests)})

        async def answers(number):
            begin = count
            await until(lambda: count > begin + number)

        async with polled(monkeypatch, answer) as (poller, news):
            await until(lambda: news == [KEY])
            requests["in_flight"] = 1
            await answers(3)
            assert news == [KEY]
            requests |= {"in_flight": 0, "running": 1}
            await answers(3)
            requests |= {"running": 1, "waiting": 0}
            await answers(3)
            assert news == [KEY], "a sequence of a gateway runs"
            requests["running"] = 0
            await until(lambda: news == [KEY, KEY])
            await answers(3)
            assert news == [KEY, KEY]
            assert poller.reading(KEY, "chat-0").status.requests.unfinished == 0

    asyncio.run(run())


def test_a_gateway_that_begins_to_hold_requests_is_an_event_and_more_requests_are_not(monkeypatch):
    async def run():
        waits = [0, 0, 3, 4, 5]

        def say(number):
            waiting = waits[min(number, len(waits)) - 1]
            return GOOD | {"state": "recovering", "ranks": [], "requests": {"waiting": waiting}}

        gateway = Counted(say)
        async with polled(monkeypatch, gateway.answer) as (_, news):
            await until(lambda: gateway.num > len(waits) + 1)
            assert news == [KEY, KEY]

    asyncio.run(run())


PHASE = {"name": "load", "seconds": 1.0, "done": 5, "total": 9, "unit": "B", "finished": False}
STARTING = GOOD | {"state": "starting", "last_token_age_seconds": None, "startup": [PHASE]}


@pytest.mark.parametrize(
    ("before", "after", "is_progress"),
    [
        (STARTING, STARTING, False),
        (STARTING, STARTING | {"startup": [PHASE | {"seconds": 2.0}]}, False),
        (STARTING, STARTING | {"startup": [PHASE | {"done": 6}]}, True),
        (STARTING, STARTING | {"state": "recovering"}, True),
        (GOOD, GOOD, True),
        (GOOD | {"last_token_age_seconds": 20.0}, GOOD | {"last_token_age_seconds": 21.0}, False),
    ],
)
def test_progress_is_service_or_a_step_of_the_start(monkeypatch, before, after, is_progress):
    async def run():
        answers, asked = [before], []

        async def answer(request):
            asked.append(answers[0])
            return web.json_response(answers[0])

        async with polled(monkeypatch, answer) as (poller, _):
            await until(lambda: poller.reading(KEY, "chat-0"))
            advanced_at = poller.reading(KEY, "chat-0").advanced_at
            answers[0] = after
            # A request that is already in flight may still get the previous answer.
            asked.clear()
            await until(lambda: len(asked) > 3)
            assert (poller.reading(KEY, "chat-0").advanced_at > advanced_at) is is_progress

    asyncio.run(run())


def test_a_container_that_was_started_again_is_another_engine(monkeypatch):
    async def run():
        async def answer(request):
            return web.json_response(GOOD)

        async with polled(monkeypatch, answer) as (poller, _):
            await until(lambda: poller.reading(KEY, "chat-0"))
            poller.follow(KEY, {"chat-0": Target("127.0.0.1", "secret", "uid-1", 1)})
            assert poller.reading(KEY, "chat-0") is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("num_engines", "seconds"),
    [(0, 1), (50, 1), (100, 2), (250, 5), (3000, 5), (6000, 10), (9000, 15), (50_000, 15)],
)
def test_many_engines_are_polled_more_slowly(num_engines, seconds):
    assert serving_interval_s(num_engines) == seconds


def test_engines_that_are_yet_to_be_found_slow_the_questions_to_those_that_are(monkeypatch):
    async def run():
        engine = Counted()
        async with polled(monkeypatch, engine.answer, num_expected=10_000) as (poller, _):
            await until(lambda: poller.reading(KEY, "chat-0"))
            await asyncio.sleep(0.2)  # ten times the interval of one engine
            assert engine.num == 1
            poller.nudge(KEY)
            await until(lambda: engine.num == 2)

    asyncio.run(run())


def test_answers_from_before_the_drain_request_count_no_more(monkeypatch):
    async def run():
        is_asked, is_released = asyncio.Event(), asyncio.Event()
        states = iter(("serving", "late", *("draining",) * 1000))

        async def answer(request):
            state = next(states)
            if state == "late":  # this answer is in flight when the drain request is sent
                state = "serving"
                is_asked.set()
                await is_released.wait()
            return web.json_response(GOOD | {"state": state})

        async with polled(monkeypatch, answer) as (poller, news):
            await is_asked.wait()
            before = poller.reading(KEY, "chat-0")
            assert (before.status.state, before.status.requests.in_flight) == ("serving", 0)
            poller.note_drain(KEY, "chat-0", True)
            told = poller.reading(KEY, "chat-0")
            assert (told.status.state, told.at) == ("draining", before.at)
            assert told.status.requests.in_flight == 1, "nobody knows that it has none"
            num_news = len(news)
            is_released.set()
            await until(lambda: len(news) > num_news)
            after = poller.reading(KEY, "chat-0")
            assert (after.status.state, after.status.requests.in_flight) == ("draining", 0)

    asyncio.run(run())


@pytest.mark.parametrize("state", ["serving", "recovering"])
def test_an_engine_that_falls_silent_at_its_drain_request_has_served(monkeypatch, state):
    async def run():
        answers = [GOOD | {"state": state}]

        async def answer(request):
            return web.json_response(answers[0]) if answers else web.Response(status=500)

        async with polled(monkeypatch, answer) as (poller, news):
            await until(lambda: poller.reading(KEY, "chat-0"))
            answers.clear()
            await until(lambda: poller.reading(KEY, "chat-0").failing_since)
            since, num_news = poller.reading(KEY, "chat-0").failing_since, len(news)
            poller.note_drain(KEY, "chat-0", True)
            # A drain request that changes no state is no event. If it were an event, a caller that repeats the request
            # would be requeued each time.
            assert len(news) - num_news == (state == "serving")
            num_failures = poller.num_failures
            await until(lambda: poller.num_failures > num_failures + 2)
            reading = poller.reading(KEY, "chat-0")
            assert reading.failing_since == since
            assert reading.status.state == ("draining" if state == "serving" else state)
            poller.note_drain(KEY, "another", True)

    asyncio.run(run())


def test_engines_are_counted_and_those_without_an_answer_are_reported(monkeypatch):
    async def run():
        async def answer(request):
            return web.json_response(GOOD)

        async with polled(monkeypatch, answer) as (poller, _):
            far = Target("127.0.0.1", "secret", "uid-9")
            poller.follow(("team", "other"), {"other-0": far, "other-1": far})
            assert poller.num_engines == 3
            poller.follow(("team", "other"), {"other-1": far})
            assert poller.num_engines == 2
            # An engine that was not polled yet is not silent.
            assert poller.silent(asyncio.get_running_loop().time() + 100) == []
            await until(lambda: poller.reading(KEY, "chat-0") and poller.reading(("team", "other"), "other-1"))
            poller.follow(("team", "other"), {})
            assert poller.num_engines == 1
            at = poller.reading(KEY, "chat-0").at
            assert (poller.silent(at), poller.silent(at + 100)) == ([], [KEY])

    asyncio.run(run())


def test_an_engine_of_the_previous_key_is_polled_with_its_own_token(monkeypatch):
    """The operator's key was changed, and existing engines keep the token from the previous key."""

    async def run():
        tokens = []

        async def answer(request):
            tokens.append(request.headers["Authorization"])
            return web.json_response(GOOD, status=200 if tokens[-1] == "Bearer old" else 401)

        async with polled(monkeypatch, answer) as (poller, _):
            await until(lambda: poller.num_failures)
            assert set(tokens) == {"Bearer secret"}
            poller.follow(KEY, {"chat-0": Target("127.0.0.1", "secret", "uid-1", old_token="old")})
            await until(lambda: poller.reading(KEY, "chat-0"))
            assert poller.reading(KEY, "chat-0").status.state == "serving"

    asyncio.run(run())


def test_messages_that_change_with_each_answer_are_an_event_now_and_then(monkeypatch):
    async def run():
        monkeypatch.setattr(engine_poller, "_WORDS_INTERVAL_S", 3600.0)

        def say(number):
            return GOOD | {"state": "recovering", "reason": "x" * number, "ranks": [{"node": f"n{number}"}]}

        engine = Counted(say)
        async with polled(monkeypatch, engine.answer) as (poller, news):
            await until(lambda: engine.num > 5)
            assert news == [KEY]
            monkeypatch.setattr(engine_poller, "_WORDS_INTERVAL_S", 0.0)
            await until(lambda: len(news) > 3)
            # The reading always has the last answer.
            assert len(poller.reading(KEY, "chat-0").status.reason) > 5

    asyncio.run(run())
