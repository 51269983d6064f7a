"""Speculation changes no token: many requests run on real ranks with and without it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import Engine
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.speculation.drafter import SpeculationConfig
from rayloom_engine.core.step import TokenLogprobs
from rt_stages import StagesInARow, load_stages, make_engine, stage_config
from rt_tiny import tiny_checkpoint

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
    return DecodingParams(max_tokens=rng.randrange(1, 28), temperature=temperature, seed=number, **chosen)


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
        for output in engine.step():
            ids, _, entries = found[output.sequence_id]
            entries += [*output.prompt_logprobs, *output.logprobs]
            found[output.sequence_id] = ([*ids, *output.token_ids], output.finish_reason or "", entries)
            num_running -= output.finish_reason is not None
        engine.scheduler.check_integrity()
    return found


@pytest.mark.parametrize(
    ("backend", "num_stages", "num_requests"), [("library", 1, 200), ("torch", 1, 40), ("library", 2, 40)]
)
def test_every_request_has_the_same_tokens_with_speculation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, num_stages: int, num_requests: int
) -> None:
    if backend == "torch":
        monkeypatch.setenv("RAYLOOM_CPU_ISA", "torch")
    ranks = load_stages(stage_config(tiny_checkpoint(tmp_path), num_stages))
    expected = _answers(make_engine(StagesInARow(ranks), depth=num_stages), _sequences(num_requests))
    engine = make_engine(StagesInARow(ranks), depth=num_stages, speculation=SPECULATION)
    got = _answers(engine, _sequences(num_requests))
    for name, (ids, reason, entries) in expected.items():
        assert got[name][:2] == (ids, reason), f"request {name}"
        assert [entry.token_id for entry in got[name][2]] == [entry.token_id for entry in entries]
        assert [entry.logprob for entry in got[name][2]] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    counters = engine.scheduler.counters
    assert counters.accepted_tokens > num_requests, "speculation was at work"
    assert counters.draft_tokens > counters.accepted_tokens, "some drafts were wrong"
    assert num_stages > 1 or counters.num_preemptions > 0
