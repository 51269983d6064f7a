"""Weights of a model in several forms: their bytes, speed and perplexity, measured in one process without HTTP."""

from __future__ import annotations

import importlib.resources
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayloom_engine.errors import ConfigError
from rayloom_engine.llm import LLM
from rayloom_engine.sampling_params import SamplingParams

FORMS = ("none", "int8")  # the forms: values of the setting `quantization`
WINDOW = 2048  # most tokens of the text that are scored at once
_NUM_STREAMS = 16
_PROMPT_TOKENS = 128
_LONG_PROMPT_TOKENS = 1024
_KV_BLOCKS = 512  # room for the largest batch below, and for a window of the text


@dataclass(slots=True)
class FormFigures:
    """The measurements of one form of the weights. Lists have an entry for each round."""

    weight_bytes: int
    load_s: float
    perplexity: float = 0.0
    one_stream_tok_s: list[float] = field(default_factory=list)  # W3's sizes: 128 tokens in, 128 out, one at a time
    many_streams_tok_s: list[float] = field(default_factory=list)  # W1's sizes: 128 tokens in, 64 out, 16 at a time
    prompt_tok_s: list[float] = field(default_factory=list)  # a prompt of 1024 tokens


def fixed_text() -> str:
    """Returns a text of about 1700 tokens, copied from old pages of Rayloom. The copy never changes."""
    return importlib.resources.files("rayloom_bench").joinpath("quality_text.txt").read_text(encoding="utf-8")


def measure(model: str, dtype: str, threads: int | None, text: str, *, num_rounds: int) -> dict[str, FormFigures]:
    """Returns form -> its figures."""
    engines: dict[str, LLM] = {}
    found: dict[str, FormFigures] = {}
    for form in FORMS:
        start = time.perf_counter()
        settings = {"max_model_len": WINDOW + 1, "num_kv_blocks": _KV_BLOCKS, "threads": threads, "device": "cpu"}
        engines[form] = LLM(model, dtype=dtype, quantization=form, **settings)
        seconds = time.perf_counter() - start
        found[form] = FormFigures(weight_bytes=engines[form].model.weight_bytes, load_s=seconds)
        found[form].perplexity = perplexity(engines[form], text)
    for number in range(num_rounds):
        for form, llm in engines.items():
            print(f"round {number + 1} of {num_rounds}: {form}", file=sys.stderr, flush=True)
            _measure_speed(llm, number, found[form])
    for llm in engines.values():
        llm.shutdown()
    return found


def perplexity(llm: LLM, text: str) -> float:
    """Returns exp(-mean log-probability) of the text's tokens. Each window of WINDOW tokens is scored alone.

    Raises ConfigError for a text of fewer than two tokens.
    """
    ids = llm.tokenizer.encode(text)
    # The first token of a window has no log-probability, so a window of one token is left out.
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW) if len(ids) - start > 1]
    if not windows:
        raise ConfigError("--text: a text needs at least two tokens; give a longer one")
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0)
    logprobs = [
        token.logprob for window in windows for token in llm.generate(window, params, use_tqdm=False)[0].prompt_logprobs
    ]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def table(found: dict[str, FormFigures]) -> str:
    """A table of the figures: medians of speeds over the rounds, and the ratio of each form to the first form."""
    lines = [
        f"{'weights':<9}{'MB':>8}{'start s':>9}{'1 stream tok/s':>16}{'16 streams tok/s':>18}{'prompt tok/s':>14}"
        f"{'perplexity':>12}"
    ]
    first = next(iter(found.values()))
    for form, figures in found.items():
        speeds = [_median(values) for values in _speeds(figures)]
        lines.append(
            f"{form:<9}{figures.weight_bytes / 1e6:>8.1f}{figures.load_s:>9.2f}{speeds[0]:>16.1f}{speeds[1]:>18.1f}"
            f"{speeds[2]:>14.1f}{figures.perplexity:>12.4f}"
        )
        if figures is not first:
            ratios = [a / _median(values) for a, values in zip(speeds, _speeds(first), strict=True)]
            worse = figures.perplexity / first.perplexity - 1
            memory = figures.weight_bytes / first.weight_bytes
            lines.append(
                f"{'':<9}{memory:>7.2f}x{'':>9}{ratios[0]:>15.2f}x{ratios[1]:>17.2f}x{ratios[2]:>13.2f}x{worse:>+12.2%}"
            )
    return "\n".join(lines)


def _speeds(figures: FormFigures) -> tuple[list[float], ...]:
    return figures.one_stream_tok_s, figures.many_streams_tok_s, figures.prompt_tok_s


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _measure_speed(llm: LLM, seed: int, figures: FormFigures) -> None:
    rng = random.Random(seed)

    def prompts(number: int, length: int) -> list[list[int]]:
        return [rng.choices(range(llm.model.vocab_size), k=length) for _ in range(number)]

    figures.one_stream_tok_s.append(128 / _seconds(llm, prompts(1, _PROMPT_TOKENS), 128))
    many = prompts(_NUM_STREAMS, _PROMPT_TOKENS)
    figures.many_streams_tok_s.append(_NUM_STREAMS * 64 / _seconds(llm, many, 64))
    figures.prompt_tok_s.append(_LONG_PROMPT_TOKENS / _seconds(llm, prompts(1, _LONG_PROMPT_TOKENS), 1))


def _seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Returns the wall time of the prompts with answers of `num_tokens` tokens each."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return seconds
