"""Requests for tests of speculation, and executors that run them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rayloom_engine.core.decoding import DecodingParams, ThinkingBudget
from rayloom_engine.core.engine import Engine, Executor
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.step import StepPlan, StepResult, TokenLogprobs
from rayloom_engine.errors import RankLost
from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.text.message_parsing.tool_formats import HERMES
from rayloom_engine.text.tools.call_grammar import call_grammar
from rayloom_engine.text.tools.tool import Tool, ToolMode, ToolUse
from rayloom_engine.worker.masks import MASKS_S
from rt_forms import ids_of

NUM_AT_ONCE = 5


def _params(rng: random.Random, number: int, lengths: range) -> DecodingParams:
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
    return DecodingParams(max_tokens=rng.choice(lengths), temperature=temperature, seed=number, **chosen)


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


def requests(num: int, lengths: range = range(1, 28)) -> list[Sequence]:
    """Requests with repetitive texts. Every fifth request is the second choice of the request before it.

    `lengths`: the possible limits of an answer's tokens.
    """
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
                params=_params(rng, number, lengths),
                eos_token_ids=(2,),
                fork_of=leader,
            )
        )
    return sequences


class FailingExecutor:
    """An executor that fails in some steps, before or after the ranks have computed. `step` calls `forget_all` then."""

    def __init__(self, executor: Executor, rng: random.Random) -> None:
        self._executor = executor
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


class TimedExecutor:
    """An executor whose steps seem to take these times: 1 s, and 10 ms for each draft token and each draft pass.

    A token with which the draft model catches up takes 0.1 ms.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._plans: deque[StepPlan] = deque()
        self.num_proposed = 0

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        steps = self._plans.popleft().slots
        result = self._executor.collect()
        work = result.draft_work
        if work is not None:
            work = msgspec.structs.replace(
                work, proposal_s=0.01 * work.num_passes, catch_up_s=0.0001 * work.num_catch_up_tokens
            )
        self.num_proposed += sum(len(proposal.token_ids) for proposal in result.proposals)
        return msgspec.structs.replace(
            result,
            forward_s=1.0 + 0.01 * sum(len(step.draft_token_ids) for step in steps),
            sample_s=0.0,
            waited_s=0.0,
            draft_work=work,
        )

    def forget_all(self) -> None:
        self._plans.clear()
        self._executor.forget_all()


def jumping_clock(rng: random.Random) -> Callable[[], float]:
    """A CPU clock that passes the limit of a step's masks now and then."""
    times = itertools.accumulate(rng.choice((0.0, 0.0, 0.0, MASKS_S)) + 1e-6 for _ in itertools.count())
    return times.__next__


def _step(engine: Engine) -> list[SequenceOutput]:
    with contextlib.suppress(RankLost):
        return engine.step()
    return []


Answers = dict[str, tuple[list[int], str, list[TokenLogprobs]]]


def expect_same(expected: Answers, got: Answers) -> None:
    for name, (ids, reason, entries) in expected.items():
        assert got[name][:2] == (ids, reason), f"request {name}"
        assert [entry.token_id for entry in got[name][2]] == [entry.token_id for entry in entries]
        assert [entry.logprob for entry in got[name][2]] == pytest.approx([e.logprob for e in entries], abs=1e-4)


def answers_of(engine: Engine, sequences: list[Sequence]) -> Answers:
    """Request id -> token ids, finish reason, log-probabilities of answer and prompt."""
    waiting = sequences[::-1]
    found: Answers = {}
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
