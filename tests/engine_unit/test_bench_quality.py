"""`bench quality`: perplexity of a text, the bound of int8 weights, and the table."""

from __future__ import annotations

import math

import pytest

from rayloom_bench import quality
from rayloom_bench.quality import FormFigures, fixed_text, perplexity, table
from rayloom_engine.errors import ConfigError
from rayloom_engine.llm import LLM
from rt_library import ISAS


@pytest.mark.skipif(not ISAS, reason="there is no C library")
def test_int8_weights_change_the_perplexity_of_a_fixed_text_by_less_than_a_percent() -> None:
    found = quality.measure("builtin://smollm2-135m", "bfloat16", 1, fixed_text()[:2500], num_rounds=0)
    plain, int8 = found["none"], found["int8"]
    assert int8.perplexity == pytest.approx(plain.perplexity, rel=0.01)
    assert int8.perplexity != plain.perplexity
    assert 10 < plain.perplexity < 100
    assert int8.weight_bytes < 0.51 * plain.weight_bytes


def test_perplexity_is_that_of_windows_each_scored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "WINDOW", 8)
    with LLM("builtin://smollm2-135m", num_kv_blocks=4, threads=1) as llm:
        text = "One two three four five six seven eight nine"
        ids = llm.tokenizer.encode(text)
        assert len(ids) == 9, "a window of eight tokens, and one that is too short"
        params = quality.SamplingParams(max_tokens=0, prompt_logprobs=0)
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
