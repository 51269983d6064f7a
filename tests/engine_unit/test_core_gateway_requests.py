"""The counts of gateways' requests in a core's status, by which rollouts are judged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from rayloom_engine.core.adapter import Adapter, ServedAdapter
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.embeds import Embeds
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.sequence import BROKEN_ADAPTER
from rayloom_engine.core_server.sockets import Disconnected, GatewayConnected
from rayloom_engine.protocol.gateway_requests import FIRST_TOKEN_BOUNDS_S
from rayloom_engine.protocol.messages import (
    Abort,
    Refused,
    Submit,
)
from rt_core import MODEL, SUBMIT, CoreUnderTest, NoIo
from rt_scheduler import POISON

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
    after.core._io = NoIo()  # type: ignore[assignment]
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


def test_choices_that_move_without_the_first_one_do_not_count_again(behind_gateway: CoreUnderTest) -> None:
    for name in ("1", "2"):
        behind_gateway.take(GATEWAY, _submit(name, generated_ids=(7,), is_resume=True, is_further_choice=True))
    _compute(behind_gateway)
    assert _counted(behind_gateway) == (0, 0, 0), "the engine that finished choice 0 has counted the request"


def test_the_time_to_a_first_token_begins_when_the_core_gets_the_request(behind_gateway: CoreUnderTest) -> None:
    times = iter((100.0, 100.3, 100.4))
    behind_gateway.core._gateways._clock = lambda: next(times)
    behind_gateway.take(GATEWAY, _submit("s", prompt_ids=(1, 2, 3)))
    _compute(behind_gateway)
    found = behind_gateway.core._gateways.report()
    assert found.first_token_s == pytest.approx(0.3)
    by_bound = dict(zip((*FIRST_TOKEN_BOUNDS_S, None), found.first_token_counts, strict=True))
    assert {bound for bound, number in by_bound.items() if number} == {0.5}
