"""The core's loop with messages of fronts and a rank without a model."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from rayloom_engine.core.adapter import Adapter, ServedAdapter
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.embeds import Embeds
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.sequence import BROKEN_ADAPTER
from rayloom_engine.core.speculation.drafter import Drafter, SpeculationConfig
from rayloom_engine.core_server.black_box import BlackBox
from rayloom_engine.core_server.loop import Core
from rayloom_engine.core_server.sockets import Disconnected, GatewayConnected, InboxMessage
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.protocol.gateway_requests import FIRST_TOKEN_BOUNDS_S
from rayloom_engine.protocol.messages import (
    Abort,
    CacheChanges,
    LoadReport,
    Refused,
    ServedModel,
    Submit,
    WantCache,
)
from rt_scheduler import POISON, VOCAB, SimulatedRank, make_scheduler

MODEL = ServedModel(
    path="",
    architecture="",
    num_parameters=1,
    vocab_size=VOCAB,
    max_model_len=40,
    eos_token_ids=(),
    dtype="float32",
    compute_dtype="float32",
    weight_bytes=4,
)
SUBMIT = Submit(sequence_id="s", prompt_ids=tuple(range(20)), params=DecodingParams(max_tokens=2, temperature=0.0))


class CoreUnderTest:
    def __init__(self, folder: Path) -> None:
        self.build_steps: dict[str, int] = {}
        self.sent: list[tuple[int, object]] = []
        self.rank = SimulatedRank(build_steps=self.build_steps)
        self.engine = Engine(make_scheduler(), LocalExecutor(self.rank), clock=time.monotonic)
        self.box = BlackBox(folder)
        self.state = CoreState(epoch=1, executor="uni", hang_seconds=3.0)
        self.core = Core(self.engine, MODEL, None, self.state, self.box)  # type: ignore[arg-type]

    def take(self, connection: int, message: InboxMessage) -> None:
        self.core._handle(connection, message)

    def die_in_a_step(self) -> None:
        self.core._hold_trial()
        assert self.engine.scheduler.schedule() is not None
        self.core._note()
        self.box.died()
        self.engine.scheduler.forget_ranks()
        self.rank.forget_all()


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
    core.core._io = _NoIo()  # type: ignore[assignment]
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


class _NoIo:
    def send(self, connection: int, message: object) -> None:
        pass


def _recorded(folder: Path) -> dict[str, tuple[int, int]]:
    data = (folder / "in_flight").read_bytes()
    return msgspec.msgpack.decode(data[4 : 4 + int.from_bytes(data[:4], "big")], type=dict[str, tuple[int, int]])


def test_the_black_box_is_empty_while_a_message_is_handled_and_when_the_engine_is_idle(
    core: CoreUnderTest, tmp_path: Path
) -> None:
    core.core._io = _NoIo()  # type: ignore[assignment]
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
    core.core._io = _NoIo()  # type: ignore[assignment]
    reported: list[int] = []
    core.engine.before_run = lambda: reported.append(core.state.stats.num_waiting + core.state.stats.num_running)
    # The first step is the probe. The prompt needs three more steps, the second token one.
    with pytest.raises(_End):
        core.core.run(_Script([], [SUBMIT]), began=lambda: None)  # type: ignore[arg-type]
    assert reported == [0, 1, 1, 1, 1]
    assert (core.state.stats.num_waiting, core.state.stats.num_running) == (0, 0)


def test_a_sequence_counts_as_running_during_its_first_step_and_a_probe_never_does(core: CoreUnderTest) -> None:
    core.core._io = _NoIo()  # type: ignore[assignment]
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


GATEWAY = 2  # the number of a gateway's connection


@pytest.fixture
def behind_gateway(tmp_path: Path) -> CoreUnderTest:
    """A core with connections of its own front (1) and of a gateway. The core's vocabulary has POISON."""
    core = CoreUnderTest(tmp_path)
    core.core.model = msgspec.structs.replace(MODEL, vocab_size=POISON + 1)
    core.core._io = SimpleNamespace(send=lambda connection, message: core.sent.append((connection, message)))  # type: ignore[assignment]
    core.take(GATEWAY, GatewayConnected())
    return core


def _compute(core: CoreUnderTest) -> None:
    while core.engine.has_unfinished:
        core.core._send(core.engine.step())


def _counted(core: CoreUnderTest) -> tuple[int, int, int]:
    """The numbers of finished requests, failed requests and first tokens in the status."""
    core.core._publish()
    found = core.state.status().gateway_requests
    return found.num_finished, found.num_failed, sum(found.first_token_counts)


def _submit(sequence_id: str, **other: object) -> Submit:
    return msgspec.structs.replace(SUBMIT, sequence_id=sequence_id, **other)


def test_only_the_requests_of_gateways_are_counted(behind_gateway: CoreUnderTest) -> None:
    behind_gateway.take(1, _submit("own"))
    behind_gateway.take(GATEWAY, _submit("a"))
    behind_gateway.take(GATEWAY, _submit("b", prompt_ids=(1, 2)))
    behind_gateway.take(GATEWAY, _submit("b2", prompt_ids=(1, 2), fork_of="b"))
    assert _counted(behind_gateway) == (0, 0, 0)
    _compute(behind_gateway)
    assert _counted(behind_gateway) == (2, 0, 2), "the choices of a prompt are one request"


def test_an_adapter_that_fails_is_a_failure_only_if_the_front_has_reported_its_files(
    behind_gateway: CoreUnderTest,
) -> None:
    behind_gateway.engine.add = lambda sequence, is_resume: None  # type: ignore[method-assign]  # it has no slots
    here, gone = Adapter("/here", b"1" * 16), Adapter("/gone", b"2" * 16)
    behind_gateway.state.adapters = (ServedAdapter(name="x", adapter=Adapter("/x", here.digest), rank=8, created=1),)
    for name, adapter in (("a", here), ("b", gone)):
        behind_gateway.take(GATEWAY, _submit(name, params=DecodingParams(max_tokens=2, adapter=adapter)))
        failed = SequenceOutput(sequence_id=f"{GATEWAY}.0/{name}", finish_reason=BROKEN_ADAPTER)
        behind_gateway.core._send([failed])
        assert _counted(behind_gateway) == (1, 1, 0)


def test_a_request_of_a_gateway_that_the_engine_spoils_is_a_failure(behind_gateway: CoreUnderTest) -> None:
    behind_gateway.take(1, _submit("own", prompt_ids=(1, POISON, 2)))
    behind_gateway.take(GATEWAY, _submit("good"))
    behind_gateway.take(GATEWAY, _submit("bad", prompt_ids=(1, POISON, 3)))
    _compute(behind_gateway)
    refused = {(number, message.reason) for number, message in behind_gateway.sent if isinstance(message, Refused)}
    assert refused == {(1, "corrupt"), (GATEWAY, "corrupt")}
    assert _counted(behind_gateway) == (2, 1, 1)


def test_a_request_of_a_gateway_that_crashes_the_engine_is_one_failure(behind_gateway: CoreUnderTest) -> None:
    behind_gateway.take(GATEWAY, SUBMIT)
    for _ in range(3):
        assert _counted(behind_gateway) == (0, 0, 0), "it is not ended by a crash"
        behind_gateway.die_in_a_step()
    behind_gateway.core._end_condemned()
    assert _counted(behind_gateway) == (1, 1, 0)


def test_a_request_that_crashed_the_core_before_is_a_failure_of_the_next_core(
    behind_gateway: CoreUnderTest, tmp_path: Path
) -> None:
    behind_gateway.take(GATEWAY, SUBMIT)
    for _ in range(3):
        behind_gateway.die_in_a_step()
    after = CoreUnderTest(tmp_path)
    after.core._io = _NoIo()  # type: ignore[assignment]
    after.take(GATEWAY, GatewayConnected())
    after.take(GATEWAY, msgspec.structs.replace(SUBMIT, is_resume=True, attempt=3))
    assert _counted(behind_gateway) == (0, 0, 0)
    assert _counted(after) == (1, 1, 0)


def test_requests_of_gateways_that_are_refused_or_given_up_do_not_count(behind_gateway: CoreUnderTest) -> None:
    for sequence_id in ("left", "moved", "complete", "complete-too"):
        behind_gateway.take(GATEWAY, _submit(sequence_id))
    behind_gateway.take(GATEWAY, Abort("left"))
    behind_gateway.take(GATEWAY, Abort("moved", is_moved=True))
    behind_gateway.take(GATEWAY, Abort("complete", is_complete=True))
    behind_gateway.take(GATEWAY, Abort("complete", is_complete=True))
    behind_gateway.take(1, Abort("complete-too", is_complete=True))
    behind_gateway.take(GATEWAY, _submit("too long", prompt_ids=tuple(range(44))))
    behind_gateway.take(GATEWAY, _submit("not a token", prompt_ids=(POISON + 1,)))
    behind_gateway.take(GATEWAY, _submit("no width", prompt_ids=(0,), embeds=Embeds("float32", 0, bytes(8))))
    assert _counted(behind_gateway) == (1, 0, 0), "a stop string ends an answer in the gateway"
    behind_gateway.take(GATEWAY, Disconnected())
    _compute(behind_gateway)
    behind_gateway.take(GATEWAY, _submit("of another front"))
    _compute(behind_gateway)
    assert _counted(behind_gateway) == (1, 0, 0)


def test_a_full_queue_is_no_failure(behind_gateway: CoreUnderTest) -> None:
    for number in range(120):
        behind_gateway.take(GATEWAY, _submit(str(number)))
    sent = [message for _, message in behind_gateway.sent if isinstance(message, Refused)]
    assert {message.reason for message in sent} == {"queue_full"}
    _compute(behind_gateway)
    num_accepted = 120 - len(sent)
    assert _counted(behind_gateway) == (num_accepted, 0, num_accepted)


def test_a_request_that_began_elsewhere_has_no_first_token_here(behind_gateway: CoreUnderTest) -> None:
    behind_gateway.take(GATEWAY, _submit("moved", generated_ids=(7,), is_resume=True))
    _compute(behind_gateway)
    assert _counted(behind_gateway) == (1, 0, 0)


def test_the_time_to_a_first_token_begins_when_the_core_gets_the_request(behind_gateway: CoreUnderTest) -> None:
    times = iter((100.0, 100.3, 100.4))
    behind_gateway.core._gateways._clock = lambda: next(times)
    behind_gateway.take(GATEWAY, _submit("s", prompt_ids=(1, 2, 3)))
    _compute(behind_gateway)
    found = behind_gateway.core._gateways.report()
    assert found.first_token_s == pytest.approx(0.3)
    by_bound = dict(zip((*FIRST_TOKEN_BOUNDS_S, None), found.first_token_counts, strict=True))
    assert {bound for bound, number in by_bound.items() if number} == {0.5}
