"""The plots of `bench peers`: files have the right names, show every engine, and are equal for equal figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rayloom_bench.peers.report.plots import draw, require_matplotlib
from rayloom_engine.errors import ConfigError
from rt_peers_result import make_result, make_turn, make_workload


def test_the_plots_show_every_engine_and_the_limit(tmp_path: Path) -> None:
    result = make_result(
        make_turn("rayloom", 1, {"W1": 6.0, "W3": 3.0}),
        make_turn("vllm", 1, {"W1": 4.0}),
        sweeps=(make_workload("D1"), make_workload("D2", concurrency=2), make_workload("P4", num_output=1)),
        sweep_turns=[make_turn("rayloom", 0, {"D1": 3.0, "D2": 4.0, "P4": 4.0})],
    )
    draw(result, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peers-roofline.svg", "peers-throughput.svg"]
    throughput = (tmp_path / "peers-throughput.svg").read_text()
    for text in ("rayloom bf16", "vLLM bf16", "machine limit", "W1", "W3"):
        assert f">{text}</text>" in throughput
    assert ">llama.cpp bf16</text>" not in throughput, "an engine without figures has no bar"
    roofline = (tmp_path / "peers-roofline.svg").read_text()
    for text in ("rayloom bf16", "machine limit", "batch size", "prompt tokens"):
        assert f">{text}</text>" in roofline


def test_equal_figures_give_equal_files_and_without_sweeps_there_is_no_roofline(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        draw(make_result(make_turn("rayloom", 1, {"W1": 6.0})), tmp_path / name)
    (one,) = (tmp_path / "one").iterdir()
    (two,) = (tmp_path / "two").iterdir()
    assert one.read_bytes() == two.read_bytes()


def test_a_missing_matplotlib_is_reported_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install './bench\[plots\]'"):
        require_matplotlib()
