"""Engines that do not answer: the times at which they are polled again, reported and dropped."""

import asyncio

import pytest
from aiohttp import web

from rayloom_operator.observe import poller as engine_poller
from rayloom_operator.observe.poller import EnginePoller, Target
from rt_operator import make_reading
from rt_poller import GOOD, KEY, Counted, polled, until


def test_silence_is_no_progress_and_the_last_word_is_kept(monkeypatch):
    async def run():
        answers = [web.json_response]

        async def answer(request):
            return answers[0](GOOD) if answers else web.Response(status=500)

        async with polled(monkeypatch, answer) as (poller, _):
            await until(lambda: poller.reading(KEY, "chat-0"))
            answers.clear()
            await until(lambda: poller.reading(KEY, "chat-0").failing_since)
            reading = poller.reading(KEY, "chat-0")
            assert reading.advanced_at <= reading.failing_since
            assert reading.status.state == "serving"

    asyncio.run(run())


def test_silence_is_an_event_when_it_begins_and_when_it_ends(monkeypatch):
    async def run():
        answers = [GOOD]

        async def answer(request):
            return web.json_response(answers[0]) if answers else web.Response(status=500)

        async with polled(monkeypatch, answer) as (poller, news):
            await until(lambda: poller.reading(KEY, "chat-0"))
            assert (len(news), poller.num_failing) == (1, 0)
            answers.clear()
            await until(lambda: poller.num_failures > 4)
            assert (len(news), poller.num_failing) == (2, 1)
            answers.append(GOOD)
            await until(lambda: len(news) == 3)
            assert poller.reading(KEY, "chat-0").failing_since is None
            assert poller.num_failing == 0
            answers.clear()
            await until(lambda: len(news) == 4)
            poller.follow(KEY, {"chat-0": Target("127.0.0.1", "secret", "uid-2")})
            assert poller.num_failing == 0
            await until(lambda: poller.num_failing == 1)
            poller.follow(KEY, {})
            assert poller.num_failing == 0

    asyncio.run(run())


def test_a_second_question_is_put_at_once_and_a_third_one_when_there_is_time(monkeypatch):
    monkeypatch.setattr(engine_poller, "_MAX_RETRIES_PER_S", 0.001)

    async def run():
        async def answer(request):
            return web.Response(status=500)

        async with polled(monkeypatch, answer) as (poller, _):
            await until(lambda: poller.num_failures == 2)
            await asyncio.sleep(0.2)  # ten times the interval to the second request
            assert poller.num_failures == 2
            poller.nudge(KEY)
            await until(lambda: poller.num_failures == 3)

    asyncio.run(run())


@pytest.mark.parametrize("num_turns", range(6))
def test_an_engine_that_is_dropped_just_after_its_pod_changed_is_polled_no_more(monkeypatch, num_turns):
    async def run():
        engine = Counted()
        async with polled(monkeypatch, engine.answer, num_expected=10_000) as (poller, _):
            await until(lambda: poller.reading(KEY, "chat-0"))
            dropped = poller._engines[KEY]["chat-0"]
            await until(lambda: dropped.is_nudged._waiters)
            poller.nudge(KEY)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            poller.follow(KEY, {})
            await asyncio.wait([dropped.task], timeout=5)
            assert dropped.task.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("num_failing", "seconds", "look_s"), [(1, 1, 1), (200, 1, 1), (1200, 6, 6), (6000, 15, 30), (60_000, 15, 300)]
)
def test_many_silent_engines_are_polled_more_slowly_after_their_second_request(num_failing, seconds, look_s):
    poller = EnginePoller(lambda _: None)
    silent = engine_poller._PolledEngine(
        service=KEY, target=Target("127.0.0.1", "secret", "uid-1"), reading=make_reading(failing_since=1.0)
    )
    poller.num_failing = num_failing
    assert poller._interval_s(silent, True) == 1
    assert poller._interval_s(silent, False) == seconds
    assert poller.retry_interval_s() == look_s
