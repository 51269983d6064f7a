"""A draft model changes no token, and a model that drafts for itself is always right.

The second property shows that the draft model's KV and the noise of its proposals are right: with forks, preemption,
chunks of prompts, prefix hits, stages and lost ranks. It does not hold for requests with a grammar or a limit of
reasoning, because the draft model proposes tokens without masks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rayloom_engine.config import EngineConfig
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import LocalExecutor
from rayloom_engine.core.planning.step_proposals import StepProposals
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.speculation.drafter import SpeculationConfig
from rayloom_engine.core.step import StepResult
from rayloom_engine.worker.slots import Slot
from rt_speculation import FailingExecutor, TimedExecutor, answers_of, expect_same, jumping_clock, requests
from rt_stages import EPOCH, RankProcesses, StagesInARow, load_stages, make_engine, stage_config
from rt_tiny import tiny_checkpoint, tiny_tokenizer

SPECULATION = SpeculationConfig(num_tokens=5, min_ngram=1, max_ngram=1, has_draft_model=True)
LONG = range(20, 38)  # lengths of answers for which blocks run out


def _drafting(folder: Path, draft: Path, num_stages: int = 1, **changes: Any) -> EngineConfig:
    return stage_config(folder, num_stages, speculation="draft", draft_model=str(draft), **changes)


@pytest.mark.parametrize(
    ("num_stages", "num_requests", "trouble", "draft"),
    [
        (1, 60, "", "int8"),  # the model's own weights in int8
        (2, 30, "", "other"),  # a random model with the same vocabulary
        (1, 50, "killed", "itself"),
        (1, 50, "late masks", "itself"),
        (1, 50, "the draft model fails", "itself"),
    ],
)
def test_every_request_has_the_same_tokens_with_a_draft_model(
    tmp_path: Path, num_stages: int, num_requests: int, trouble: str, draft: str
) -> None:
    folder = tiny_tokenizer(tiny_checkpoint(tmp_path / "model"))
    drafter = tiny_checkpoint(tmp_path / "draft", num_hidden_layers=1) if draft == "other" else folder
    quantization = "int8" if draft == "int8" else "auto"
    ranks = load_stages(_drafting(folder, drafter, num_stages, draft_quantization=quantization))
    expected = answers_of(make_engine(StagesInARow(ranks), depth=num_stages), requests(num_requests, LONG))
    stages = StagesInARow(ranks)
    if trouble == "late masks":
        stages.masks._cpu_clock = jumping_clock(random.Random(6))
    if trouble == "the draft model fails":
        stages.draft_model._computation = _FailsInTheEnd(stages.draft_model._computation)
    timed = TimedExecutor(LocalExecutor(stages))
    failing = FailingExecutor(timed, random.Random(5))
    is_killed = trouble == "killed"
    engine = make_engine(
        failing if is_killed else timed, depth=num_stages, speculation=SPECULATION, forms=ranks[-1].forms
    )
    expect_same(expected, answers_of(engine, requests(num_requests, LONG)))
    counters = engine.scheduler.counters
    assert timed.num_proposed >= counters.draft_tokens - counters.accepted_tokens > 0, "some drafts were wrong"
    assert draft == "other" or counters.accepted_tokens > num_requests, "speculation was at work"
    assert num_stages > 1 or counters.num_preemptions > 2
    assert is_killed == (failing.num_failures > 10)
    assert (trouble == "late masks") == (stages.num_postponed_drafts > 5)
    assert (trouble == "the draft model fails") == (stages.has_no_draft_model)


def test_the_first_of_two_shards_drafts(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tiny_checkpoint(tmp_path))
    sequences = [sequence for sequence in requests(40) if not sequence.params.has_mask]
    processes = RankProcesses(_drafting(folder, folder, tensor_parallel_size=2))
    try:
        processes.join(EPOCH)
        timed = TimedExecutor(processes)
        engine = make_engine(timed, speculation=SPECULATION)
        got = answers_of(engine, sequences)
    finally:
        processes.close()
    ranks = load_stages(stage_config(folder))
    alone = [sequence for sequence in requests(40) if not sequence.params.has_mask]
    expect_same(answers_of(make_engine(StagesInARow(ranks)), alone), got)
    counters = engine.scheduler.counters
    # The sums of two shards are rounded in another way than those of the draft model.
    assert counters.draft_tokens > 40
    assert counters.accepted_tokens / counters.draft_tokens > 0.9


@pytest.mark.parametrize(
    ("backend", "num_stages", "num_requests", "is_killed"),
    [("library", 1, 60, False), ("torch", 1, 40, False), ("library", 2, 40, False), ("library", 1, 60, True)],
)
def test_a_model_that_drafts_for_itself_is_always_right(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    num_stages: int,
    num_requests: int,
    is_killed: bool,
) -> None:
    if backend == "torch":
        monkeypatch.setenv("RAYLOOM_CPU_ISA", "torch")
    folder = tiny_tokenizer(tiny_checkpoint(tmp_path))
    ranks = load_stages(_drafting(folder, folder, num_stages))
    sequences = [sequence for sequence in requests(2 * num_requests, LONG) if not sequence.params.has_mask]
    assert {sequence.params.is_greedy for sequence in sequences} == {True, False}
    stages = StagesInARow(ranks)
    executor = TimedExecutor(LocalExecutor(stages))
    engine = make_engine(
        FailingExecutor(executor, random.Random(5)) if is_killed else executor,
        depth=num_stages,
        speculation=SPECULATION,
    )
    answers_of(engine, sequences)
    counters = engine.scheduler.counters
    assert counters.draft_tokens == counters.accepted_tokens > 5 * num_requests
    assert num_stages > 1 or counters.num_preemptions > 2
    assert counters.prefix_hits > 0
    drafts = engine.scheduler._drafts
    assert isinstance(drafts, StepProposals)
    whole = set(np.flatnonzero(stages.draft_model.kv.is_whole).tolist())
    # A lost rank forgets its slots, and the core then forgets blocks that nobody shares before they get a new owner.
    assert drafts.drafted_blocks.ids <= whole if is_killed else drafts.drafted_blocks.ids == whole


class _FailsInTheEnd:
    """A draft model's computation that computes 200 passes, and then fails."""

    def __init__(self, computation: Any) -> None:
        self._computation = computation
        self._num_left = 200

    def __getattr__(self, name: str) -> Any:
        return getattr(self._computation, name)

    def forward(self, *arguments: Any) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            raise RuntimeError("failed")
        return self._computation.forward(*arguments)


class _WrongAtEveryFourthPosition:
    """A draft model's computation that proposes a wrong token at the positions 4, 8, 12 and so on."""

    def __init__(self, computation: Any) -> None:
        self._computation = computation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._computation, name)

    def sample(self, logits_NV: Any, slots: list[Slot]) -> list[int | None]:
        ids = self._computation.sample(logits_NV, slots)
        return [
            token if slot.num_tokens % 4 or token is None else token ^ 1 for slot, token in zip(slots, ids, strict=True)
        ]


class _Checked(TimedExecutor):
    """An executor that expects that all draft tokens before the first wrong position are accepted, and no others."""

    num_checked = 0

    def collect(self) -> StepResult:
        steps = self._plans[0].slots
        result = super().collect()
        for step in steps:
            first = step.start + step.num_tokens - len(step.draft_token_ids)
            right = itertools.takewhile(lambda at: at % 4, range(first, first + len(step.draft_token_ids)))
            num_accepted = sum(token.slot == step.slot for token in result.accepted)
            assert num_accepted == len(list(right)), f"draft of step {result.step_id} at {first}"
            self.num_checked += bool(step.draft_token_ids)
        return result


def test_a_wrong_proposal_spoils_no_later_proposal(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tiny_checkpoint(tmp_path))
    ranks = load_stages(_drafting(folder, folder))
    stages = StagesInARow(ranks)
    stages.draft_model._computation = _WrongAtEveryFourthPosition(stages.draft_model._computation)
    executor = _Checked(LocalExecutor(stages))
    engine = make_engine(executor, speculation=SPECULATION)
    answers_of(engine, [sequence for sequence in requests(80, LONG) if not sequence.params.has_mask])
    assert executor.num_checked > 100


def _with_vocabulary(folder: Path, source: Path, num_rows: int) -> Path:
    """A copy of a tiny checkpoint whose vocabulary has another number of rows. Additional rows give high logits."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": num_rows}))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.shape[0] == config["vocab_size"]:
            more = max(0, num_rows - len(tensor))
            tensors[name] = torch.cat([tensor, 1.2 * tensor[:more]])[:num_rows].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("backend", ["library", "torch"])
@pytest.mark.parametrize(("num_model", "num_draft"), [(256, 320), (320, 256)])
def test_models_whose_vocabularies_are_padded_differently_draft_the_tokens_that_both_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, num_model: int, num_draft: int
) -> None:
    if backend == "torch":
        monkeypatch.setenv("RAYLOOM_CPU_ISA", "torch")
    plain = tiny_tokenizer(tiny_checkpoint(tmp_path / "plain"))
    padded = _with_vocabulary(tmp_path / "padded", plain, 320)
    model, draft = (plain, padded) if num_draft == 320 else (padded, plain)
    ranks = load_stages(_drafting(model, draft))
    sequences = [sequence for sequence in requests(50, LONG) if not sequence.params.has_mask]
    engine = make_engine(TimedExecutor(LocalExecutor(StagesInARow(ranks))), speculation=SPECULATION)
    got = answers_of(engine, sequences)
    alone = [sequence for sequence in requests(50, LONG) if not sequence.params.has_mask]
    expect_same(answers_of(make_engine(StagesInARow(load_stages(stage_config(model)))), alone), got)
    counters = engine.scheduler.counters
    if num_draft == 320:
        assert counters.draft_tokens == counters.accepted_tokens > 50, "the draft model is the model with more rows"
    else:
        assert any(token_id >= 256 for ids, _, _ in got.values() for token_id in ids), "tokens that the draft lacks"
        assert 0 < counters.accepted_tokens < counters.draft_tokens


def test_the_draft_model_computes_the_blocks_that_it_has_left_out(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tiny_checkpoint(tmp_path))
    ranks = load_stages(_drafting(folder, folder))
    engine = make_engine(TimedExecutor(LocalExecutor(StagesInARow(ranks))), speculation=SPECULATION)
    counters = engine.scheduler.counters

    def answer(name: str, prompt: list[int], num: int, *, speculation: bool) -> list[int]:
        params = DecodingParams(max_tokens=num, temperature=0.5, seed=3, speculation=speculation)
        return answers_of(engine, [Sequence(request_id=name, prompt_ids=prompt, params=params)])[name][0]

    for number in range(3):  # these requests use all blocks
        answer(f"before {number}", [20 + number, *range(30, 64)], 20, speculation=True)
    prompt = [*range(100, 140)]
    found = answer("left out", prompt, 9, speculation=False)
    before = dataclasses.replace(counters)
    answer("drafted", [*prompt, *found], 15, speculation=True)
    assert counters.prefix_hits - before.prefix_hits == 48, "three blocks without KV of the draft model"
    assert counters.draft_tokens - before.draft_tokens > 5
    assert counters.accepted_tokens == counters.draft_tokens
