"""`rayloom-engine bench parallel`: its checkpoint with narrow heads, and the table of given times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayloom_bench.parallel import LAYOUTS, Rounds, narrow_heads, table
from rayloom_engine.cli.commands import run
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.models.shape import read_shape
from rayloom_engine.models.shard_counts import shard_counts


def test_narrow_heads_keep_every_matrix_and_can_be_shared_by_two(tmp_path: Path) -> None:
    source = resolve("builtin://smollm2-135m", None).path
    whole, narrow = read_shape(source), read_shape(narrow_heads(source, tmp_path))
    assert 2 not in shard_counts(whole) and 2 in shard_counts(narrow)
    assert (narrow.query_size, narrow.kv_size) == (whole.query_size, whole.kv_size)
    assert narrow.num_parameters == whole.num_parameters
    assert json.loads((source / "config.json").read_text())["num_attention_heads"] == 9, "the source is left as it was"


def test_the_table_compares_medians_with_one_rank_of_the_same_model() -> None:
    times = {"1 rank": [10.0, 30.0, 12.0], "pipeline 2": [15.0, 18.0, 99.0], "tensor 2, narrow heads": [8.0]}
    times["1 rank, narrow heads"] = [8.0]
    found = {layout.name: Rounds() for layout in LAYOUTS}
    for name, walls in times.items():
        found[name] = Rounds(wall_s=walls, tok_s=[2048 / wall for wall in walls], communication=[0.25] * len(walls))
    lines = table(found).splitlines()
    assert lines[1].split() == ["1", "rank", "170.7", "12.00"]
    assert lines[2].split() == ["pipeline", "2", "113.8", "18.00", "1.50x", "<=", "1.4x", "25%", "MISSED"]
    assert lines[4].split()[-4:] == ["1.00x", "<=", "1.4x", "25%"]


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "parallel", "--rounds", "0"]) == 78
    assert "--rounds: 0 given; use 1 or more" in capsys.readouterr().err
