"""The core's loop with messages of fronts and a rank without a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.speculation.drafter import Drafter, SpeculationConfig
from rayloom_engine.core_server.sockets import Disconnected, InboxMessage
from rayloom_engine.protocol.messages import (
    Abort,
    CacheChanges,
    LoadReport,
    Submit,
    WantCache,
)
from rt_core import SUBMIT, CoreUnderTest, NoIo


@pytest.fixture
def core(tmp_path: Path) -> CoreUnderTest:
    return CoreUnderTest(tmp_path)


def test_a_front_that_crashes_with_a_poison_does_not_reset_its_count(core: CoreUnderTest) -> None:
    for connection in (1, 2, 3):
        core.take(connection, SUBMIT)
        core.die_in_a_step()
        core.take(connection, Disconnected())
        assert not core.engine.has_unfinished
    assert core.box.suspicion.condemned == ["s"]


def test_a_grammar_that_kills_the_process_while_others_are_computed_is_found(core: CoreUnderTest) -> None:
    core.take(1, msgspec.structs.replace(SUBMIT, params=DecodingParams(max_tokens=9, temperature=0.0)))
    form = DecodingParams(max_tokens=9, temperature=0.0, grammar="start: /a/")
    core.take(1, msgspec.structs.replace(SUBMIT, sequence_id="form", prompt_ids=(1, 2, 3), params=form))
    core.build_steps["1.0/form"] = 1000
    for _ in range(2):
        while not core.engine.scheduler.waiting_for_forms():
            core.engine.step()
        core.engine.step()  # the other sequence advances
        core.die_in_a_step()
    assert core.box.suspicion.suspects == {"form": (2, 3)}
    core.die_in_a_step()  # only the suspect is computed
    assert core.box.suspicion.condemned == ["form"]


class _DeadlyDrafter(Drafter):
    """Ends the process when a certain sequence needs a draft, as a fault in native code would."""

    def draft(self, token_ids, cost, most, fit=None) -> tuple[int, ...]:
        if token_ids[0] == 0:
            raise _Death
        return ()


class _Death(Exception):
    pass


@pytest.mark.parametrize("is_core_lost", [True, False])
def test_a_sequence_whose_drafts_kill_the_process_dies_once_and_ends_without_drafts(
    core: CoreUnderTest, is_core_lost: bool
) -> None:
    core.core._io = NoIo()  # type: ignore[assignment]
    speculation = SpeculationConfig(num_tokens=2, min_ngram=1, max_ngram=1)
    config = dataclasses.replace(core.engine.scheduler.config, speculation=speculation)
    settings = DecodingParams(max_tokens=6, temperature=0.0)
    submits = [
        Submit(sequence_id=name, prompt_ids=prompt, params=settings) for name, prompt in (("s", (0, 1)), ("t", (1, 2)))
    ]
    core.engine.scheduler = Scheduler(config, make_drafter=lambda: _DeadlyDrafter(speculation, 9))
    with pytest.raises(_Death):
        core.core.run(_Script([], submits), began=lambda: None)  # type: ignore[arg-type]
    core.box.died()
    if is_core_lost:
        core.take(1, Disconnected())
    submits.append(msgspec.structs.replace(submits[1], sequence_id="u"))
    with pytest.raises(_End):
        core.core.run(_Script([], submits if is_core_lost else submits[2:]), began=lambda: None)  # type: ignore[arg-type]
    assert core.engine.scheduler.counters.generation_tokens >= 18
    assert not core.engine.has_unfinished


def test_an_abort_clears_a_suspect(core: CoreUnderTest) -> None:
    core.take(1, SUBMIT)
    core.die_in_a_step()
    core.die_in_a_step()
    assert core.box.suspicion.suspects == {"s": (0, 8)}
    core.take(1, Abort("s", is_moved=True))
    assert core.box.suspicion.suspects == {"s": (0, 8)}, "it may come back from another engine"
    core.take(1, Abort("s"))
    assert core.box.suspicion.suspects == {}


def test_a_part_of_a_prompt_that_gets_past_the_deadly_one_clears_a_suspect(core: CoreUnderTest) -> None:
    core.take(1, SUBMIT)
    core.die_in_a_step()
    core.die_in_a_step()
    core.core._hold_trial()
    core.engine.step()  # positions 0 to 7
    core.core._hold_trial()
    assert core.box.suspicion.suspects == {}
    core.die_in_a_step()  # positions 8 to 15
    assert (core.box.suspicion.suspects, core.box.suspicion.condemned) == ({}, [])


def test_the_patience_is_longer_in_a_trial(core: CoreUnderTest) -> None:
    core.take(1, SUBMIT)
    core.die_in_a_step()
    assert core.state.patience_s == 3.0
    core.die_in_a_step()
    assert core.state.patience_s == 3.0
    core.die_in_a_step()
    assert core.state.patience_s == 12.0


class _End(Exception):
    pass


class _Script:
    """An inbox that returns the next list of messages at each call of `take`. The loop ends when it is idle."""

    def __init__(self, *mail: list[Submit | Abort]) -> None:
        self._mail = list(mail)

    def take(self):
        return [(1, message) for message in self._mail.pop(0)] if self._mail else []

    def wait(self, seconds: float, at_most: float) -> bool:
        raise _End


def _recorded(folder: Path) -> dict[str, tuple[int, int]]:
    data = (folder / "in_flight").read_bytes()
    return msgspec.msgpack.decode(data[4 : 4 + int.from_bytes(data[:4], "big")], type=dict[str, tuple[int, int]])


def test_the_black_box_is_empty_while_a_message_is_handled_and_when_the_engine_is_idle(
    core: CoreUnderTest, tmp_path: Path
) -> None:
    core.core._io = NoIo()  # type: ignore[assignment]
    records = []
    handle = core.core._handle

    def watched(connection: int, message: InboxMessage) -> None:
        records.append((type(message), _recorded(tmp_path)))
        handle(connection, message)

    core.core._handle = watched  # type: ignore[method-assign]
    # The step of the first probe and the second chunk of the prompt run without messages.
    inbox = _Script([], [SUBMIT], [], [Abort("other")])
    with pytest.raises(_End):
        core.core.run(inbox, began=lambda: None)  # type: ignore[arg-type]
    assert records == [(Submit, {}), (Abort, {})]
    assert _recorded(tmp_path) == {}


def test_an_idle_engine_reports_a_sequence_before_its_first_step_which_may_be_long(core: CoreUnderTest) -> None:
    core.core._io = NoIo()  # type: ignore[assignment]
    reported: list[int] = []
    core.engine.before_run = lambda: reported.append(core.state.stats.num_waiting + core.state.stats.num_running)
    # The first step is the probe. The prompt needs three more steps, the second token one.
    with pytest.raises(_End):
        core.core.run(_Script([], [SUBMIT]), began=lambda: None)  # type: ignore[arg-type]
    assert reported == [0, 1, 1, 1, 1]
    assert (core.state.stats.num_waiting, core.state.stats.num_running) == (0, 0)


def test_a_sequence_counts_as_running_during_its_first_step_and_a_probe_never_does(core: CoreUnderTest) -> None:
    core.core._io = NoIo()  # type: ignore[assignment]
    reported: list[tuple[int, int]] = []
    note = core.core._note

    def watched() -> None:
        note()
        reported.append((core.state.stats.num_waiting, core.state.stats.num_running))

    core.engine.before_run = watched
    with pytest.raises(_End):
        core.core.run(_Script([], [SUBMIT]), began=lambda: None)  # type: ignore[arg-type]
    assert reported == [(0, 0), (0, 1), (0, 1), (0, 1), (0, 1)]  # the first step is the probe


def test_a_step_replaces_the_record_of_the_step_before(core: CoreUnderTest, tmp_path: Path) -> None:
    core.take(1, SUBMIT)
    core.engine.step()
    core.core._end_step()
    assert _recorded(tmp_path) == {"s": (0, 8)}, "its plan has ended, and the next one is recorded at once"
    core.engine.step()
    core.core._end_step()
    assert _recorded(tmp_path) == {"s": (8, 16)}
    core.engine.scheduler.restrict(frozenset())
    core.engine.step()  # it computes nothing
    core.core._end_step()
    assert _recorded(tmp_path) == {}


def test_the_end_of_a_trial_is_recorded_at_once(core: CoreUnderTest, tmp_path: Path) -> None:
    core.take(1, SUBMIT)
    core.die_in_a_step()
    core.die_in_a_step()
    core.core._hold_trial()
    core.engine.step()
    assert core.box.is_trial
    core.core._end_step()
    assert (core.box.is_trial, _recorded(tmp_path)) == (False, {})


def test_a_front_that_asks_gets_the_cache_until_it_disconnects(tmp_path: Path) -> None:
    core = CoreUnderTest(tmp_path)
    sent: list[tuple[int, object]] = []
    core.core._publisher._io = SimpleNamespace(send=lambda connection, message: sent.append((connection, message)))  # type: ignore[assignment]
    core.take(1, SUBMIT)
    core.take(2, WantCache())
    assert [(connection, type(message)) for connection, message in sent] == [(2, CacheChanges), (2, LoadReport)]
    core.engine.step()
    core.core._publisher.publish(1.0)
    assert [(connection, type(message)) for connection, message in sent[2:]] == [(2, CacheChanges), (2, LoadReport)]
    core.take(2, Disconnected())
    core.engine.step()
    core.core._publisher.publish(2.0)
    assert len(sent) == 4
    assert core.engine.scheduler.pool.log is None


def test_a_front_that_asks_later_learns_that_the_load_is_as_it_was_before(tmp_path: Path) -> None:
    core = CoreUnderTest(tmp_path)
    sent: list[tuple[int, object]] = []
    core.core._publisher._io = SimpleNamespace(send=lambda connection, message: sent.append((connection, message)))  # type: ignore[assignment]
    core.take(2, WantCache())
    idle = sent[-1][1]
    core.core._publisher.publish(1.0)
    core.take(1, SUBMIT)
    core.take(3, WantCache())
    assert sent[-1][0] == 3
    assert sent[-1][1] != idle
    core.take(1, Disconnected())
    core.core._publisher.publish(2.0)
    assert (3, idle) in sent
