"""The status has the progress of starting engines, with a bounded rate of writes.

test_controller_events.py tests that a changed text of a reading triggers a reconcile, and that the reconcile writes the
text to the status.
"""

import asyncio

import pytest

from rayloom_operator.api.status import Reason
from rayloom_operator.engines.progress import (
    NO_PROGRESS,
    StartProgress,
    amount_in_words,
    interval_s,
    start_progress,
)
from rayloom_operator.engines.status import Phase
from rayloom_operator.observe import poller as engine_poller
from rayloom_operator.observe.verdict import judge
from rt_operator import NOW, make_group, make_pod, make_reading, make_resolved, make_said, make_serving, turn
from rt_poller import GOOD, KEY, Counted, polled, until

GB, MB = 10**9, 10**6


def make_phase(name="load", done=0, total=0, unit="bytes", *, finished=False):
    return Phase(name=name, seconds=1.0, done=done, total=total, unit=unit, finished=finished)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (make_phase(done=41_200_000_000, total=131 * GB), "41 of 131 GB"),
        (make_phase(done=0, total=131 * GB), "0 of 131 GB"),
        (make_phase(done=400 * MB, total=1_200 * MB), "0.4 of 1.2 GB"),
        (make_phase(done=12 * MB, total=270 * MB), "12 of 270 MB"),
        (make_phase(done=0, total=400_000), "0 of 0 MB"),
        (make_phase(done=41 * GB, total=0), "41 GB"),
        (make_phase("resolve", done=41 * GB, total=80 * GB), "41 GB"),
        (make_phase(done=1, total=2, unit="ranks"), ""),
        (make_phase("resolve", done=0, total=1, unit="models"), ""),
        (make_phase(), ""),
    ],
)
def test_amounts_have_the_unit_of_the_total(phase, words):
    assert amount_in_words(phase) == words


def load(gigabytes):
    return (make_phase("import", finished=True), make_phase(done=gigabytes * GB, total=131 * GB))


def test_within_a_phase_the_text_changes_every_ten_seconds():
    first = start_progress(NO_PROGRESS, load(1), 100.0, 10.0)
    soon = start_progress(first, load(9), 109.9, 10.0)
    later = start_progress(soon, load(10), 110.0, 10.0)

    assert first == StartProgress("load", "1 of 131 GB", 100.0)
    assert soon is first
    assert later == StartProgress("load", "10 of 131 GB", 110.0)


def test_progress_with_the_same_text_is_unchanged():
    first = start_progress(NO_PROGRESS, load(1), 100.0, 10.0)

    assert start_progress(first, load(1), 200.0, 10.0) is first


def test_another_phase_and_the_end_of_all_phases_change_the_text_at_once():
    first = start_progress(NO_PROGRESS, load(1), 100.0, 10.0)
    warm_up = start_progress(first, (make_phase(finished=True), make_phase("warm_up", unit="")), 100.1, 10.0)

    assert warm_up == StartProgress("warm_up", "", 100.1)
    assert start_progress(warm_up, (), 100.2, 10.0) is NO_PROGRESS
    assert start_progress(NO_PROGRESS, (), 100.3, 10.0) is NO_PROGRESS


@pytest.mark.parametrize(("num_engines", "seconds"), [(1, 10.0), (200, 10.0), (1000, 50.0), (10_000, 500.0)])
def test_all_engines_together_cause_twenty_writes_a_second_at_most(num_engines, seconds):
    assert interval_s(num_engines) == seconds
    assert num_engines / interval_s(num_engines) <= 20


def starting(amount="41 of 131 GB", phase="load", startup=None):
    said = make_said("starting", None, startup=load(41) if startup is None else startup)
    return make_reading(said, start=StartProgress(phase, amount, 100.0))


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (starting(), "The engine starts: load: 41 of 131 GB."),
        (starting(phase="resolve"), "The engine starts: load."),
        (starting(amount=""), "The engine starts: load."),
        (starting("", "", ()), "The engine starts."),
        (starting("", "warm_up", (make_phase("warm_up", unit=""),)), "The engine starts: warm up."),
    ],
)
def test_the_message_has_the_phase_and_its_progress(reading, message):
    verdict = judge(make_group(make_pod(), reading=reading), NOW)

    assert (verdict.reason, verdict.message) == (Reason.STARTING, message)


def test_the_status_has_the_progress_of_the_first_starting_engine():
    resolved = make_resolved(replicas=2)
    serving, loading = make_serving(resolved), make_serving(resolved, 1, reading=starting())

    assert turn(resolved, [serving]).document.get("loading") is None
    assert turn(resolved, [serving, loading]).document["loading"] == "41 of 131 GB"
    assert turn(resolved, [make_serving(resolved, reading=starting(amount=""))]).document.get("loading") is None


def says(number):
    """The engine's status number `number`. Each status has loaded one GB more than the status before."""
    phase = {"name": "load", "seconds": 1.0, "total": 131 * GB, "unit": "bytes", "finished": False}
    return GOOD | {"state": "starting", "last_token_age_seconds": None, "startup": [phase | {"done": number * GB}]}


def test_progress_of_a_load_triggers_no_reconcile_before_the_interval_is_over(monkeypatch):
    async def run():
        engine = Counted(says)
        async with polled(monkeypatch, engine.answer) as (poller, news):
            await until(lambda: engine.num >= 6)
            reading = poller.reading(KEY, "chat-0")
            return len(news), reading.start.amount, reading.status.startup[0].done >= 5 * GB

    # The interval is far longer than the time for six responses, also on a slow machine.
    monkeypatch.setattr(engine_poller, "interval_s", lambda _: 1000.0)
    assert asyncio.run(run()) == (1, "1 of 131 GB", True)


def test_progress_of_a_load_triggers_a_reconcile_after_the_interval(monkeypatch):
    async def run():
        engine = Counted(says)
        async with polled(monkeypatch, engine.answer) as (poller, news):
            await until(lambda: len(news) >= 4)
            return poller.reading(KEY, "chat-0").start.amount

    monkeypatch.setattr(engine_poller, "interval_s", lambda _: 0.0)
    assert asyncio.run(run()).endswith(" of 131 GB")
