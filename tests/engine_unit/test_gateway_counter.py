"""Random histories of gateways' sequences: each sequence counts at most once, even if messages arrive after its end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.sequence import BROKEN_ADAPTER, BROKEN_FORM, CORRUPT
from rayloom_engine.core_server.gateway_counter import GatewayCounter
from rayloom_engine.protocol.messages import Submit

OWN, *GATEWAYS = CONNECTIONS = (1, 2, 12)  # names of sequences of 1 and 12 begin with the same digit
EVENTS = ("token", "stop", CORRUPT, BROKEN_FORM, BROKEN_ADAPTER, "complete", "failed", "forget", "disconnect")
# the events that count
IS_FAULT = {"stop": False, "complete": False, CORRUPT: True, BROKEN_ADAPTER: True, "failed": True}
SUBMIT = Submit(sequence_id="s", prompt_ids=(1,), params=DecodingParams(max_tokens=9))


def _apply(counter: GatewayCounter, event: str, request_id: str) -> None:
    match event:
        case "token":
            counter.observe([SequenceOutput(sequence_id=request_id, token_ids=(1,))])
        case "complete":
            counter.complete(request_id)
        case "failed":
            counter.failed(request_id)
        case "forget":
            counter.forget(request_id)
        case "disconnect":
            counter.disconnected(int(request_id.partition(".")[0]))
        case reason:
            counter.observe([SequenceOutput(sequence_id=request_id, finish_reason=reason)])


@pytest.mark.parametrize(
    ("end", "has_adapter", "finished_failed"),
    [
        (BROKEN_ADAPTER, True, (1, 1)),
        (BROKEN_ADAPTER, False, (0, 0)),
        ("stop", False, (1, 0)),
        (CORRUPT, False, (1, 1)),
    ],
)
def test_an_adapter_that_the_engine_had_not_reported_is_no_fault(
    end: str, has_adapter: bool, finished_failed: tuple[int, int]
) -> None:
    counter = GatewayCounter()
    counter.connected(2)
    counter.submitted(2, "2.0/s", SUBMIT, has_adapter=has_adapter)
    _apply(counter, end, "2.0/s")
    assert (counter.report().num_finished, counter.report().num_failed) == finished_failed


@given(st.lists(st.tuples(st.sampled_from(CONNECTIONS), st.sampled_from(EVENTS)), max_size=30))
def test_a_sequence_counts_by_its_first_end(history: list[tuple[int, str]]) -> None:
    counter = GatewayCounter(clock=lambda: 5.0)
    request_ids = {connection: f"{connection}.0/s" for connection in CONNECTIONS}
    for connection in GATEWAYS:
        counter.connected(connection)
    for connection, request_id in request_ids.items():
        counter.submitted(connection, request_id, SUBMIT)
    for connection, event in history:
        _apply(counter, event, request_ids[connection])

    ends, num_begun = [], 0
    for connection in GATEWAYS:
        events = [event for each, event in history if each == connection]
        end = next((place for place, event in enumerate(events) if event != "token"), len(events))
        ends += events[end : end + 1]
        num_begun += end > 0
    found = counter.report()
    assert found.num_finished == sum(end in IS_FAULT for end in ends)
    assert found.num_failed == sum(IS_FAULT.get(end, False) for end in ends)
    assert found.first_token_counts == (num_begun, *[0] * 20)
