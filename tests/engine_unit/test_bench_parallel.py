"""`rayloom-engine bench parallel`: its checkpoint with narrow heads, and the table of given times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayloom_bench.client import Failure
from rayloom_bench.parallel.layouts import LAYOUTS, NARROW_LAYOUTS, narrow_heads, variant_name
from rayloom_bench.parallel.page import page
from rayloom_bench.variants.rounds import Sample, Variant, VariantResult, measure_variants
from rayloom_bench.workload import Workload
from rayloom_engine.cli.commands import run
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.models.shape import read_shape
from rayloom_engine.models.shard_counts import shard_counts
from rt_tiny import tiny_tokenizer, tiny_variant


def test_narrow_heads_keep_every_matrix_and_can_be_shared_by_two(tmp_path: Path) -> None:
    source = resolve("builtin://smollm2-135m", None).path
    whole, narrow = read_shape(source), read_shape(narrow_heads(source, tmp_path))
    assert 2 not in shard_counts(whole) and 2 in shard_counts(narrow)
    assert (narrow.query_size, narrow.kv_size) == (whole.query_size, whole.kv_size)
    assert narrow.num_parameters == whole.num_parameters
    assert json.loads((source / "config.json").read_text())["num_attention_heads"] == 9, "the source is left as it was"


def result_of(tok_s: dict[str, list[float]], communication: float = 0.25, others_percent: float = 1.0) -> VariantResult:
    """A result with these tokens per second in rounds 1, 2 ..."""
    return VariantResult(
        samples={
            name: {
                number: Sample(output_tok_s=value, communication=communication, others_percent=others_percent)
                for number, value in enumerate(values, start=1)
            }
            for name, values in tok_s.items()
        }
    )


def test_seconds_per_token_are_compared_with_one_rank_of_the_same_round_model_and_type() -> None:
    result = result_of(
        {
            "1 rank, bfloat16": [100.0, 40.0, 100.0],
            "pipeline 2, bfloat16": [80.0, 25.0, 50.0],  # 1.25, 1.6 and 2 times as slow
            "tensor 3, bfloat16": [50.0, 20.0, 50.0],
            "1 rank, float32": [30.0],
            "pipeline 2, float32": [25.0],
            "1 rank, narrow heads, bfloat16": [50.0],
            "tensor 2, narrow heads, bfloat16": [50.0],
        }
    )
    layouts = (*LAYOUTS, *NARROW_LAYOUTS)
    lines = page(result, layouts, ("bfloat16", "float32"), "A chip.").splitlines()
    assert "| bfloat16 | 1 rank | 100 (40.0 to 100) | 10.0 (10.0 to 25.0) |  |  |  |  |" in lines
    assert (
        "| bfloat16 | pipeline 2 | 50.0 (25.0 to 80.0) | 20.0 (12.5 to 40.0) | 1.60x (1.25 to 2.00) | at most 1.4x "
        "| missed | 25.0 % |" in lines
    )
    assert any(
        line.startswith("| bfloat16 | tensor 3 |") and "| 2.00x | at most 2.2x | met |" in line for line in lines
    )
    assert "| float32 | pipeline 2 | 25.0 | 40.0 | 1.20x | at most 1.4x | met | 25.0 % |" in lines
    assert "| float32 | tensor 3 | - | - | - | at most 2.2x | not measured | - |" in lines
    assert any("tensor 2, narrow heads" in line and "| 1.00x | at most 1.4x | met |" in line for line in lines)


def test_a_layout_is_started_with_its_ranks_and_type() -> None:
    pipeline = LAYOUTS[1].variant("m", "float32")
    assert pipeline.name == variant_name(LAYOUTS[1], "float32") == "pipeline 2, float32"
    flags = dict(zip(pipeline.flags[::2], pipeline.flags[1::2], strict=True))
    assert flags == {
        "--model": "m",
        "--dtype": "float32",
        "--tensor-parallel-size": "1",
        "--pipeline-parallel-size": "2",
        "--executor": "mp",
    }
    assert LAYOUTS[0].variant("m", "float32").flags[-1] == "uni"


def test_variants_are_measured_in_turn_and_a_broken_one_is_a_failure(tmp_path: Path) -> None:
    model = tiny_variant(tmp_path / "tiny", "llama")
    tiny_tokenizer(model)
    variants = [
        Variant(name="broken", flags=("--model", "/no/such/model")),
        Variant(name="tiny", flags=("--model", str(model), "--threads", "1")),
    ]
    workload = Workload(name="W", num_requests=1, concurrency=1, num_own=4, num_output=4)
    lines: list[str] = []
    result = measure_variants(variants, workload, num_rounds=1, seed=0, vocab_size=256, log=lines.append)
    assert lines == ["round 1 of 1: broken", "round 1 of 1: tiny"]
    (failure,) = result.failures
    assert failure.name == "broken, round 1" and "ended with exit code" in failure.reason
    assert result.samples["broken"] == {}
    assert result.tok_s("tiny")[1] > 0
    assert result.samples["tiny"][1].communication == pytest.approx(0.0, abs=1.0)


def test_the_most_disturbed_sample_counts_and_failures_are_listed() -> None:
    result = result_of({"1 rank, float32": [1.0]}, others_percent=7.0)
    assert result.most_disturbed_percent == 7.0
    assert VariantResult().most_disturbed_percent == 0.0
    result.failures.append(Failure(name="tensor 3, round 1", reason="no memory\nmore"))
    assert "- tensor 3, round 1: no memory" in page(result, LAYOUTS, ("float32",), "").splitlines()


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "parallel", "--rounds", "0"]) == 78
    assert "--rounds: 0 given; use 1 or more" in capsys.readouterr().err


def test_an_unknown_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "parallel", "--dtypes", "int8"]) == 78
    assert "--dtypes: 'int8' given; name one or more of bfloat16" in capsys.readouterr().err
