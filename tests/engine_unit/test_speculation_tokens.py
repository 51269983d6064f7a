"""Speculation changes no token: many requests run on real ranks with and without it.

Half of the requests have a grammar or a limit of reasoning. Some runs lose their ranks again and again.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rayloom_engine.core.engine import LocalExecutor
from rayloom_engine.core.speculation.drafter import SpeculationConfig
from rt_speculation import FailingExecutor, answers_of, expect_same, jumping_clock, requests
from rt_stages import StagesInARow, load_stages, make_engine, stage_config
from rt_tiny import tiny_checkpoint, tiny_tokenizer

SPECULATION = SpeculationConfig(num_tokens=5, min_ngram=1, max_ngram=3)


@pytest.mark.parametrize(
    ("backend", "num_stages", "num_requests", "trouble"),
    [
        ("library", 1, 400, ""),
        ("torch", 1, 100, ""),
        ("library", 2, 80, ""),
        ("library", 1, 100, "killed"),
        ("library", 1, 200, "late masks"),
    ],
)
def test_every_request_has_the_same_tokens_with_speculation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    num_stages: int,
    num_requests: int,
    trouble: str,
) -> None:
    if backend == "torch":
        monkeypatch.setenv("RAYLOOM_CPU_ISA", "torch")
    ranks = load_stages(stage_config(tiny_tokenizer(tiny_checkpoint(tmp_path)), num_stages))
    expected = answers_of(make_engine(StagesInARow(ranks), depth=num_stages), requests(num_requests))
    stages = StagesInARow(ranks)
    failing = FailingExecutor(LocalExecutor(stages), random.Random(5))
    is_killed = trouble == "killed"
    if trouble == "late masks":
        stages.masks._cpu_clock = jumping_clock(random.Random(6))
    engine = make_engine(
        failing if is_killed else stages, depth=num_stages, speculation=SPECULATION, forms=ranks[-1].forms
    )
    sequences = requests(num_requests)
    got = answers_of(engine, sequences)
    expect_same(expected, got)
    counters = engine.scheduler.counters
    assert counters.accepted_tokens > num_requests, "speculation was at work"
    assert counters.draft_tokens > counters.accepted_tokens, "some drafts were wrong"
    assert num_stages > 1 or counters.num_preemptions > 0
    assert is_killed == (failing.num_failures > 20)
    assert (trouble == "late masks") == (stages.num_postponed_drafts > 10)
    with_forms = [sequence for sequence in sequences if sequence.params.has_mask and sequence.drafter is not None]
    rates = [sequence.drafter.acceptance.rate for sequence in with_forms if sequence.drafter is not None]
    assert max(rates) > 0.5 > min(rates), "drafts of sequences with masks were right and wrong"
