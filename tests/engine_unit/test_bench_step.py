"""`bench step`: costs checked by hand, the table, the plot, and one run of a tiny model on the C library."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_bench.step import page as step_page
from rayloom_bench.step.cost import Cost, ElementBytes, StepShape, phase_costs, total
from rayloom_bench.step.limits import Limits
from rayloom_bench.step.plot import draw, log_range, y_ticks
from rayloom_bench.step.rank import STEP_PHASES, StepRank, decode_step, fastest, prefill_steps
from rayloom_bench.step.sweeps import EXPECTED, LIMIT, MEASURED, TOKEN_PANEL, Line, Panel
from rayloom_bench.step.table import limit_of_step, table
from rayloom_engine.config import EngineConfig
from rayloom_engine.models.shape import ModelShape, read_shape
from rt_library import ISAS
from rt_tiny import tiny_variant


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def shape(folder: Path) -> ModelShape:
    return read_shape(folder)  # 2 layers, width 64, MLP 96, 4 query heads and 2 key/value heads of 16, 256 tokens


def test_costs_of_a_decode_step_by_hand(shape: ModelShape) -> None:
    costs = phase_costs(shape, decode_step(3, 10), ElementBytes(2, 2))
    assert costs["qkv"] == Cost(2 * (64 + 64) * 64 * 2, 2 * 3 * 2 * (64 + 64) * 64)
    assert costs["down"] == Cost(2 * 96 * 64 * 2, 2 * 3 * 2 * 96 * 64)
    assert costs["gate, up"].num_bytes == 2 * costs["down"].num_bytes
    assert costs["head"] == Cost(256 * 64 * 2, 2 * 3 * 256 * 64)
    # 3 sequences x 10 positions x 2 layers of 64 elements; 4 operations for each of 64 elements of the query heads.
    assert costs["attention"] == Cost(3 * 10 * 2 * 64 * 2, 3 * 10 * 2 * 4 * 64)


def test_a_prompt_sees_a_triangle_of_positions_and_a_window_cuts_it(shape: ModelShape) -> None:
    step = StepShape(starts=(2,), counts=(3,))  # tokens 2, 3, 4 see 3, 4 and 5 positions
    assert phase_costs(shape, step, ElementBytes(1, 4))["attention"] == Cost(2 * 5 * 64 * 4, 2 * 4 * 64 * (3 + 4 + 5))
    windowed = replace(shape, layer_windows=(None, 2))  # in layer 1 a token sees 2 positions; the step reads 1 to 4
    assert phase_costs(windowed, step, ElementBytes(1, 4))["attention"] == Cost((5 + 4) * 64 * 4, 4 * 64 * (12 + 6))


@given(length=st.integers(1, 3000), chunk=st.integers(1, 700))
def test_the_steps_of_a_prompt_cover_it_once(length: int, chunk: int) -> None:
    steps = prefill_steps(length, chunk)
    assert [position for step in steps for position in range(step.starts[0], step.starts[0] + step.counts[0])] == list(
        range(length)
    )
    assert max(step.num_tokens for step in steps) <= chunk


def test_the_limit_is_the_slower_of_reading_and_computing() -> None:
    assert Cost(100, 10).limit_s(50.0, 10.0) == 2.0
    assert Cost(100, 60).limit_s(50.0, 10.0) == 6.0
    costs = {"a": Cost(100, 10), "b": Cost(100, 60)}
    assert limit_of_step(costs, Limits(50.0, 10.0)) == 8.0
    assert total(list(costs.values())) == Cost(200, 70)


def test_the_table_has_rates_and_the_share_of_the_limit() -> None:
    seconds = {"norm": 0.001, "qkv": 0.003, "host": 0.0}
    lines = table(seconds, {"qkv": Cost(30_000_000, 6_000_000)}, Limits(20e9, 10e9)).splitlines()
    assert lines[1].split() == ["norm", "1.000", "25.0%"]
    assert lines[2].split() == ["qkv", "3.000", "75.0%", "30.0", "6.0", "10.0", "2.0", "50%"]
    assert lines[-1].split()[:3] == ["step", "4.000", "100.0%"]
    assert lines[-1].split()[-1] == "38%"  # 1.5 of 4 ms


def test_a_plot_has_a_point_for_each_measurement() -> None:
    lines = (Line("measured", ((1, 10.0), (8, 60.0))), Line("machine limit", ((1, 20.0), (8, 160.0))))
    panels = [
        Panel(title="decode", x_label="sequences", y_label="tok/s", is_log=True, lines=lines),
        Panel(title="a < b", x_label="context", y_label="ms", is_log=False, lines=lines),
    ]
    root = ElementTree.fromstring(draw(panels, "CPU & more"))
    name = "{http://www.w3.org/2000/svg}"
    circles = [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in root.iter(f"{name}circle")]
    assert len(circles) == 4 and circles[1][0] > circles[0][0] and circles[1][1] < circles[0][1]
    assert "a < b" in [each.text for each in root.iter(f"{name}text")]
    assert draw(panels, "CPU & more") == draw(panels, "CPU & more")


def test_the_page_compares_each_point_with_the_limit_and_each_context_with_the_reads_of_its_keys_and_values() -> None:
    decode = Panel(
        title="decode",
        x_label="sequences",
        y_label="tok/s",
        is_log=True,
        lines=(Line(MEASURED, ((1, 60.0), (16, 300.0))), Line(LIMIT, ((1, 100.0), (16, 1000.0)))),
    )
    token = Panel(
        title=TOKEN_PANEL,
        x_label="context",
        y_label="ms",
        is_log=False,
        lines=(
            Line(MEASURED, ((1024, 5.0), (4096, 6.6), (8192, 8.4))),
            Line(EXPECTED, ((1024, 5.0), (4096, 6.0), (8192, 7.0))),
        ),
    )
    text = step_page.page("A chip.", {"decode, 1 sequence": "phase ms"}, [decode, token])
    lines = text.splitlines()
    assert "| 1 | 60.0 | 100 | 60% |" in lines and "| 16 | 300 | 1000 | 30% |" in lines
    assert "| 1024 | 5.00 | 5.00 | +0.00 | +0.00 | 1.00x | - |  |" in lines
    assert "| 4096 | 6.60 | 6.00 | +1.60 | +1.00 | 1.10x | at most 1.1x | met |" in lines
    assert "| 8192 | 8.40 | 7.00 | +3.40 | +2.00 | 1.20x | at most 1.1x | missed |" in lines
    assert "## Phases: decode, 1 sequence" in lines and "phase ms" in lines
    assert f"]({step_page.PLOT})" in text and "](" not in step_page.page("A chip.", {}, [])


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(230.0, 7900.0, (200.0, 10_000.0)), (1.0, 5.0, (1.0, 5.0)), (0.3, 0.3, (0.2, 0.5))]
)
def test_a_logarithmic_axis_ends_at_ticks(low: float, high: float, expected: tuple[float, float]) -> None:
    assert log_range(low, high) == pytest.approx(expected)


@given(low=st.floats(0.01, 1e4), factor=st.floats(1.0, 1e4))
def test_ticks_lie_between_the_values(low: float, factor: float) -> None:
    high = low * factor
    assert all(low <= tick <= high for tick in y_ticks(low, high, is_log=True))
    linear = y_ticks(low, high, is_log=False)
    assert linear[0] == 0 and len(linear) == 6 and linear[-1] >= high * (1 - 1e-9)


@pytest.mark.skipif(not ISAS, reason="there is no C library")
@pytest.mark.parametrize("isa", ISAS)
def test_a_measured_step_has_a_time_for_each_phase(folder: Path, isa: str) -> None:
    config = EngineConfig(model=str(folder), dtype="bfloat16")
    rank = StepRank(config, 2, {"RAYLOOM_CPU_ISA": isa, "HOME": str(folder)})
    assert rank.library.instruction_set == isa
    for steps, sequences in (([decode_step(3, 20)], 3), (prefill_steps(40, 16), 1)):
        seconds = fastest(rank.runner(sequences, 40), steps, 2)
        assert list(seconds) == list(STEP_PHASES)
        assert all(value > 0.0 for value in seconds.values())
    with rank.library.profile() as phases:
        pass
    rank.runner(1, 40).seconds(decode_step(1, 20))
    assert sum(phases) == 0.0, "nothing is measured after the context"
