"""`bench quality`: perplexity of a text, the bound of int8 weights, and the table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rayloom_bench.client import Failure
from rayloom_bench.quality import forms
from rayloom_bench.quality.forms import FormFigures, fixed_text, perplexity, table
from rayloom_bench.quality.page import page
from rayloom_bench.variants.rounds import Sample, VariantResult
from rayloom_engine.cli.commands import run
from rayloom_engine.errors import ConfigError
from rayloom_engine.llm import LLM
from rt_library import ISAS


@pytest.mark.skipif(not ISAS, reason="there is no C library")
def test_int8_weights_change_the_perplexity_of_a_fixed_text_by_less_than_a_percent() -> None:
    found = forms.measure("builtin://smollm2-135m", "bfloat16", 1, fixed_text()[:2500], num_rounds=0)
    plain, int8 = found["none"], found["int8"]
    assert int8.perplexity == pytest.approx(plain.perplexity, rel=0.01)
    assert int8.perplexity != plain.perplexity
    assert 10 < plain.perplexity < 100
    assert int8.weight_bytes < 0.51 * plain.weight_bytes


def test_perplexity_is_that_of_windows_each_scored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "WINDOW", 8)
    with LLM("builtin://smollm2-135m", num_kv_blocks=4, threads=1) as llm:
        text = "One two three four five six seven eight nine"
        ids = llm.tokenizer.encode(text)
        assert len(ids) == 9, "a window of eight tokens, and one that is too short"
        params = forms.SamplingParams(max_tokens=0, prompt_logprobs=0)
        (output,) = llm.generate(ids[:8], params, use_tqdm=False)
        logprobs = [token.logprob for token in output.prompt_logprobs]
        assert len(logprobs) == 7
        assert perplexity(llm, text) == pytest.approx(math.exp(-sum(logprobs) / 7))
        with pytest.raises(ConfigError, match="at least two tokens"):
            perplexity(llm, "a")


def test_the_table_compares_with_plain_weights() -> None:
    plain = FormFigures(200_000_000, 2.0, 50.0, [10.0, 30.0, 20.0], [100.0], [1000.0])
    int8 = FormFigures(101_000_000, 3.0, 50.1, [35.0], [150.0, 150.0], [1100.0])
    assert table({"none": plain, "int8": int8}).splitlines() == [
        "weights        MB  start s  1 stream tok/s  16 streams tok/s  prompt tok/s  perplexity",
        "none        200.0     2.00            20.0             100.0        1000.0     50.0000",
        "int8        101.0     3.00            35.0             150.0        1100.0     50.1000",
        "            0.51x                    1.75x             1.50x         1.10x      +0.20%",
    ]


def over_http(plain: list[float], int8: list[float]) -> VariantResult:
    """A result with these tokens per second in rounds 1, 2 ..."""
    samples = {
        form: {
            number: Sample(output_tok_s=value, communication=0.0, others_percent=1.0)
            for number, value in enumerate(values, start=1)
        }
        for form, values in (("none", plain), ("int8", int8))
    }
    return VariantResult(samples=samples)


@pytest.mark.parametrize(
    ("int8_tok_s", "perplexity_of_int8", "rows"),
    [
        (
            [150.0, 330.0],
            50.4,
            ["1.57x (1.50 to 1.65) | met", "50.4 against 50.0, +0.80% | met"],
        ),
        (
            [149.0, 298.0],
            50.6,
            ["1.49x | missed", "50.6 against 50.0, +1.20% | missed"],
        ),
        ([], 49.0, ["- | not measured", "49.0 against 50.0, -2.00% | met"]),
    ],
)
def test_the_page_compares_rounds_over_http_and_both_perplexities(
    int8_tok_s: list[float], perplexity_of_int8: float, rows: list[str]
) -> None:
    plain = FormFigures(200, 2.0, 50.0, [10.0], [100.0], [1000.0])
    int8 = FormFigures(100, 2.0, perplexity_of_int8, [10.0], [100.0], [1000.0])
    result = over_http([100.0, 200.0], int8_tok_s)
    result.failures.append(Failure(name="int8, round 3", reason="it ended\nlog"))
    lines = page({"none": plain, "int8": int8}, result, "a chip", "direct").splitlines()
    assert f"| W3 over HTTP: at least 1.5x plain weights | {rows[0]} |" in lines
    assert f"| perplexity: at most 1% above plain weights | {rows[1]} |" in lines
    assert "| none | 150 (100 to 200) | 7.50 (5.00 to 10.0) |" in lines
    assert "- int8, round 3: it ended" in lines


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--page", "/no/such/place"], "--page: /no/such/place cannot be used as a folder (No such file or directory)"),
        (["--scale", "2"], "--scale: 2 given"),
    ],
)
def test_wrong_flags_are_refused_before_a_model_is_loaded(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "quality", *flags]) == 78
    assert reason in capsys.readouterr().err


def test_the_command_writes_the_page_without_rounds(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("One two three four five six.")
    flags = ["--rounds", "0", "--http-rounds", "0", "--threads", "1", "--text", str(text), "--page", str(tmp_path)]
    assert run(["bench", "quality", *flags]) == 0
    assert "not measured" in (tmp_path / "int8.md").read_text()
