"""The replay of traces: the time of a request, checked by hand, and the committed traces and table."""

from pathlib import Path

import pytest

from scaling_replay.__main__ import CASES, MOST, PAGE, START_S, TTFT_S
from scaling_replay.engine import SimulatedEngine
from scaling_replay.fleet import replay
from scaling_replay.rules import Fixed, Kpa, Scaler
from scaling_replay.traces import Request, Shape, requests


def test_a_request_alone_takes_the_steps_of_its_prompt():
    engine = SimulatedEngine(ready_at=0.0)
    engine.add(Request(at=10.0, prompt=3000, output=3), 10.0)
    engine.run(100.0)
    # Steps of 2048 and 952 tokens; the second step reads the context of the first. Then two decodes.
    first, second = 0.025 + 2048 * 0.000_12, 0.025 + 952 * 0.000_12 + 2048 * 0.000_000_12
    assert engine.first_tokens == [(10.0, pytest.approx(first + second))]
    decodes = sum(0.025 + 0.000_12 + (3001 + index) * 0.000_000_12 for index in range(2))
    assert engine.at == pytest.approx(10 + first + second + decodes)
    assert (engine.held, engine.reserved, engine.queued, engine.is_busy) == (0, 0, 0, False)


def test_the_traces_have_the_requests_of_the_originals():
    assert [len(requests(Shape(trace=name))) for name in ("conv", "code")] == [19_366, 8_819]
    found = requests(Shape(trace="conv", hours=2, night=0.1))
    assert 19_366 < len(found) < 2 * 19_366
    assert found == sorted(found, key=lambda each: each.at)


def test_every_request_is_answered_and_the_scaler_beats_a_small_fleet_and_knative_on_bursts():
    found = requests(Shape(trace="code"))[:4000]
    outcomes = [
        replay(found, rule, start_s=START_S, ttft_s=TTFT_S) for rule in (Fixed(2), Kpa(24, MOST), Scaler(MOST, TTFT_S))
    ]
    fixed, knative, ours = (each.percent_over for each in outcomes)
    assert ours < min(fixed, knative)
    assert outcomes[0].most == 2


def test_the_page_has_a_row_for_each_rule():
    text = Path(PAGE).read_text(encoding="utf-8")
    for name, (_, sizes) in CASES.items():
        assert text.count(f"| {name} | ") == len(sizes) + 3
