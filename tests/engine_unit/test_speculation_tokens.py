"""Speculation changes no token: many requests run on real ranks with and without it.

Half of the requests have a grammar or a limit of reasoning. Some runs lose their ranks again and again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.core.decoding import DecodingParams, ThinkingBudget
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.speculation.drafter import SpeculationConfig
from rayloom_engine.core.step import StepPlan, StepResult, TokenLogprobs
from rayloom_engine.errors import RankLost
from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.text.message_parsing.tool_formats import HERMES
from rayloom_engine.text.tools.call_grammar import call_grammar
from rayloom_engine.text.tools.tool import Tool, ToolMode, ToolUse
from rayloom_engine.worker.masks import MASKS_S
from rt_forms import ids_of
from rt_stages import StagesInARow, load_stages, make_engine, stage_config
from rt_tiny import tiny_checkpoint, tiny_tokenizer

SPECULATION = SpeculationConfig(num_tokens=5, min_ngram=1, max_ngram=3)
NUM_AT_ONCE = 5


def _params(rng: random.Random, number: int) -> DecodingParams:
    """Settings of a request. Every second request is greedy."""
    wishes = {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "logit_bias": ((5, 3.0), (9, -50.0)),
        "bad_words": ((3, 4), (7,), (8, 8)),
        "min_tokens": 6,
        "stop_token_ids": (11, 12, 13, 14, 15),
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "allowed_token_ids": tuple(range(0, 256, 3)),
    }
    chosen = {name: wishes[name] for name in rng.sample(sorted(wishes), rng.randrange(4))}
    if number % 3:
        chosen["frequency_penalty"] = -1.5  # so that the answer repeats itself
    temperature = rng.choice((0.05, 0.2, 0.8)) if number % 2 else 0.0
    if number // 5 % 2:
        chosen |= rng.choice(_forms())
    return DecodingParams(max_tokens=rng.randrange(1, 28), temperature=temperature, seed=number, **chosen)


@functools.cache
def _forms() -> tuple[dict[str, Any], ...]:
    """The settings of sequences with masks: every kind of grammar, a limit of reasoning, and both together."""
    rows = {"type": "array", "items": {"enum": [{"id": 1}, {"id": 2}]}, "minItems": 3}
    schema = {"type": "object", "properties": {"in": {"enum": ["Rome", "Oslo"]}}}
    tools = (Tool(name="weather", parameters=schema, is_strict=True, document={}),)
    modes: tuple[ToolMode, ...] = ("required", "auto")
    calls = [call_grammar(ToolUse(tools=tools, mode=mode, callable=tools), HERMES, {}) for mode in modes]
    end = {"ends": ("</t>",), "end_ids": tuple(ids_of("</t>"))}
    structured = [
        StructuredOutputs(json=rows),
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex="(ab|cd|ae){2,9}"),
        StructuredOutputs(choice=["abcabcabcabc", "abcabcabcabd", "xyz"]),
        StructuredOutputs(grammar='root ::= ("tick " | "tock ")+ "end"'),
        StructuredOutputs(lark="start: a b\na: /[ab]+c/\nb[max_tokens=8]: /[0-9]+/"),
    ]
    grammars = [*(grammar_of(form) for form in structured), *(grammar for grammar in calls if grammar)]
    assert len(grammars) == 8
    budgets = [ThinkingBudget(num_tokens=num, start="", **end) for num in (0, 5, 9)]
    after = {"grammar": grammars[2], "grammar_after": "</t>"}
    return (
        *({"grammar": grammar} for grammar in grammars),
        *({"thinking": budget} for budget in budgets),
        *({"thinking": budget, **after} for budget in budgets),
    )


def _sequences(num: int) -> list[Sequence]:
    """Requests with repetitive texts. Every fifth request is the second choice of the request before it."""
    rng = random.Random(4)
    sequences: list[Sequence] = []
    for number in range(num):
        phrase = [rng.randrange(16, 256) for _ in range(rng.randrange(1, 7))]
        prompt = (phrase * 5)[: rng.randrange(1, 26)]
        leader = None
        if number % 5 == 4:
            leader = sequences[-1].request_id
            prompt = list(sequences[-1].prompt_ids)
        sequences.append(
            Sequence(
                request_id=str(number),
                prompt_ids=prompt,
                params=_params(rng, number),
                eos_token_ids=(2,),
                fork_of=leader,
            )
        )
    return sequences


class _Fails:
    """An executor that fails in some steps, before or after the ranks have computed. `step` calls `forget_all` then."""

    def __init__(self, ranks: StagesInARow, rng: random.Random) -> None:
        self._executor = LocalExecutor(ranks)
        self._rng = rng
        self.num_failures = 0

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        fate = self._rng.randrange(16)
        if fate == 1:
            self._executor.collect()
        if fate < 2:
            self.num_failures += 1
            raise RankLost(0, "killed")
        return self._executor.collect()

    def forget_all(self) -> None:
        self._executor.forget_all()


def _jumping_clock(rng: random.Random) -> Callable[[], float]:
    """A CPU clock that passes the limit of a step's masks now and then."""
    times = itertools.accumulate(rng.choice((0.0, 0.0, 0.0, MASKS_S)) + 1e-6 for _ in itertools.count())
    return times.__next__


def _step(engine: Engine) -> list[SequenceOutput]:
    with contextlib.suppress(RankLost):
        return engine.step()
    return []


def _answers(engine: Engine, sequences: list[Sequence]) -> dict[str, tuple[list[int], str, list[TokenLogprobs]]]:
    """Request id -> token ids, finish reason, log-probabilities of answer and prompt."""
    waiting = sequences[::-1]
    found: dict[str, tuple[list[int], str, list[TokenLogprobs]]] = {}
    num_running = 0
    while waiting or engine.has_unfinished:
        while waiting and num_running < NUM_AT_ONCE:
            sequence = waiting.pop()
            found[sequence.request_id] = ([], "", [])
            engine.add(sequence)
            num_running += 1
        for output in _step(engine):
            ids, _, entries = found[output.sequence_id]
            entries += [*output.prompt_logprobs, *output.logprobs]
            found[output.sequence_id] = ([*ids, *output.token_ids], output.finish_reason or "", entries)
            num_running -= output.finish_reason is not None
        engine.scheduler.check_integrity()
    return found


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
    expected = _answers(make_engine(StagesInARow(ranks), depth=num_stages), _sequences(num_requests))
    stages = StagesInARow(ranks)
    failing = _Fails(stages, random.Random(5))
    is_killed = trouble == "killed"
    if trouble == "late masks":
        stages.masks._cpu_clock = _jumping_clock(random.Random(6))
    engine = make_engine(
        failing if is_killed else stages, depth=num_stages, speculation=SPECULATION, forms=ranks[-1].forms
    )
    sequences = _sequences(num_requests)
    got = _answers(engine, sequences)
    for name, (ids, reason, entries) in expected.items():
        assert got[name][:2] == (ids, reason), f"request {name}"
        assert [entry.token_id for entry in got[name][2]] == [entry.token_id for entry in entries]
        assert [entry.logprob for entry in got[name][2]] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    counters = engine.scheduler.counters
    assert counters.accepted_tokens > num_requests, "speculation was at work"
    assert counters.draft_tokens > counters.accepted_tokens, "some drafts were wrong"
    assert num_stages > 1 or counters.num_preemptions > 0
    assert is_killed == (failing.num_failures > 20)
    assert (trouble == "late masks") == (stages.num_postponed_drafts > 10)
    with_forms = [sequence for sequence in sequences if sequence.params.has_mask and sequence.drafter is not None]
    rates = [sequence.drafter.acceptance.rate for sequence in with_forms if sequence.drafter is not None]
    assert max(rates) > 0.5 > min(rates), "drafts of sequences with masks were right and wrong"
