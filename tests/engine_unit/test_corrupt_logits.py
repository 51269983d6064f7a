"""NaN logits end only the request that they belong to; in a probe they end the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import Engine
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.sequence import CORRUPT
from rayloom_engine.core.step import PromptLogprobs, SampledToken, StepPlan, StepResult, TokenLogprobs
from rayloom_engine.errors import CorruptRank
from rayloom_engine.worker.sampler import Sampler
from rt_damage import damage_head, damage_norm, damage_token
from rt_scheduler import POISON, SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence, run_to_end
from rt_slots import make_slot
from rt_stages import StagesInARow, load_stages, make_engine, stage_config
from rt_tiny import tiny_variant

NAN, INF = float("nan"), float("inf")
BAD_TOKEN = 7


@pytest.mark.parametrize(
    "row", [[0.0, NAN, 1.0], [NAN, NAN, NAN], [0.0, INF, 1.0], [-INF, -INF, -INF], [NAN, INF, -INF]]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_chosen_from_a_row_that_is_not_finite(row: list[float], temperature: float) -> None:
    logits_NV = torch.tensor([row, [0.0, -INF, 9.0]])
    slots = [make_slot(temperature=temperature), make_slot(temperature=0.0)]
    assert Sampler(3, torch.device("cpu"))(logits_NV, slots) == [None, 2]


class CorruptRankOf(SimulatedRank):
    """A simulated rank.

    Its logits for the sequence in `slot` are not finite, once this sequence has `at_tokens` tokens.
    """

    def __init__(self, slot: int, at_tokens: int) -> None:
        super().__init__()
        self._slot = slot
        self.at_tokens = at_tokens

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        bad = {step.slot for step in plan.slots if step.slot == self._slot and step.start >= self.at_tokens}
        return StepResult(
            step_id=result.step_id,
            epoch=result.epoch,
            sampled=tuple(token for token in result.sampled if token.slot not in bad),
            corrupt_slots=tuple(bad),
        )


@pytest.mark.parametrize("depth", [1, 2])
def test_a_corrupt_sequence_ends_and_releases_everything_while_others_continue(depth: int) -> None:
    scheduler = make_scheduler(depth=depth)
    scheduler.add(make_sequence("bad", range(1, 9), max_tokens=8))
    scheduler.add(make_sequence("good", (40, 41), max_tokens=8))
    outputs = run_to_end(scheduler, CorruptRankOf(slot=0, at_tokens=10))
    assert [output for output in outputs if output.finish_reason == CORRUPT] == [
        SequenceOutput(sequence_id="bad", finish_reason=CORRUPT)
    ]
    assert ids_of(outputs, "bad") == expected_ids(range(1, 9), 3), "what came before was right"
    assert ids_of(outputs, "good") == expected_ids((40, 41), 8)
    assert scheduler.counters.num_corrupt == 1
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_blocks_of_a_corrupt_sequence_are_no_prefix_for_others() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("bad", range(1, 9), max_tokens=8))
    rank = CorruptRankOf(slot=0, at_tokens=0)
    run_to_end(scheduler, rank)
    rank.at_tokens = 1000
    scheduler.add(make_sequence("next", range(1, 9), max_tokens=2))
    outputs = run_to_end(scheduler, rank)
    assert outputs[0].num_cached_tokens == 0
    assert ids_of(outputs, "next") == expected_ids(range(1, 9), 2)


def test_blocks_that_a_corrupt_sequence_has_given_back_are_no_prefix_either() -> None:
    # The window and the chunks have 8 tokens. So blocks 0 to 7 are released before the prompt of 40 tokens ends.
    scheduler, rank = make_scheduler(40, window=8), SimulatedRank(window=8)
    scheduler.add(make_sequence("bad", (POISON, *range(39)), max_tokens=2))
    assert [output.finish_reason for output in run_to_end(scheduler, rank)] == [CORRUPT]
    for end in (39, 30, 25):
        scheduler.add(make_sequence("next", (POISON, *range(end - 1)), max_tokens=2))
        plan = scheduler.schedule()
        assert [step.start for step in plan.slots] == [0]
        scheduler.update(rank.run(plan))
        scheduler.abort("next")


def test_an_aborted_prompt_is_no_prefix_for_others() -> None:
    scheduler, rank = make_scheduler(depth=2), SimulatedRank()
    scheduler.add(make_sequence("gone", range(20), max_tokens=2))
    plans = [scheduler.schedule(), scheduler.schedule()]  # 16 tokens: 4 blocks
    scheduler.abort("gone")
    for plan in plans:
        scheduler.update(rank.run(plan))
    scheduler.add(make_sequence("next", range(20), max_tokens=2))
    assert [step.start for step in scheduler.schedule().slots] == [0]


def test_a_preempted_prompt_finds_its_own_blocks_again() -> None:
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("a", range(20), max_tokens=2))
    for _ in range(2):
        scheduler.update(rank.run(scheduler.schedule()))
    scheduler.restrict(frozenset())  # the sequence is preempted
    scheduler.restrict(None)
    plan = scheduler.schedule()
    assert [step.start for step in plan.slots] == [16]
    outputs = scheduler.update(rank.run(plan)) + run_to_end(scheduler, rank)
    assert ids_of(outputs, "a") == expected_ids(range(20), 2)


def test_a_fork_copies_no_token_of_its_leader_that_may_be_a_nan() -> None:
    scheduler, rank = make_scheduler(depth=2), SimulatedRank()
    scheduler.add(make_sequence("a", range(6), max_tokens=4))
    outputs = scheduler.update(rank.run(scheduler.schedule()))
    in_flight = scheduler.schedule()  # position 6, in block 1 with the end of the prompt
    scheduler.add(make_sequence("b", range(6), max_tokens=4, fork_of="a"))
    plan = scheduler.schedule()
    assert plan.block_copies == ()
    assert [(step.start, step.num_tokens) for step in plan.slots] == [(4, 2)]
    outputs += scheduler.update(rank.run(in_flight)) + scheduler.update(rank.run(plan)) + run_to_end(scheduler, rank)
    assert ids_of(outputs, "a") == ids_of(outputs, "b") == expected_ids(range(6), 4)


def test_a_sequence_that_is_corrupt_gets_no_token_of_the_same_result() -> None:
    scheduler = make_scheduler()
    params = DecodingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    scheduler.add(make_sequence("a", range(4), params=params))
    plan = scheduler.schedule()
    result = StepResult(step_id=plan.step_id, epoch=0, sampled=(SampledToken(0, 7),), corrupt_slots=(0,))
    assert scheduler.update(result) == [SequenceOutput(sequence_id="a", finish_reason=CORRUPT)]


def test_logprobs_of_a_prompt_have_no_gap() -> None:
    scheduler = make_scheduler()
    params = DecodingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    scheduler.add(make_sequence("a", range(4), params=params))
    plan = scheduler.schedule()
    part = PromptLogprobs(0, 3, (TokenLogprobs(3, -1.0, 1),))
    with pytest.raises(AssertionError, match="from 3 on, known are those before 1"):
        scheduler.update(StepResult(step_id=plan.step_id, epoch=0, prompt_logprobs=(part,)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(params=["", "torch"], ids=["C library", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLOOM_CPU_ISA", request.param)


def run_all(engine: Engine, prompts: dict[str, list[int]], **params: int) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        decoding = DecodingParams(max_tokens=3, temperature=0.0, ignore_eos=True, **params)
        engine.add(make_sequence(name, prompt, params=decoding))
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.sequence_id].append(output)
    return outputs


def ids(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("params", [{}, {"logprobs": 2}, {"prompt_logprobs": 1}], ids=str)
def test_a_nan_weight_of_one_token_fails_only_requests_with_that_token(folder: Path, params: dict[str, int]) -> None:
    prompts = {"good": [3, 4, 5], "bad": [3, BAD_TOKEN, *range(20, 60)]}
    ranks = load_stages(stage_config(folder))
    expected = run_all(make_engine(StagesInARow(ranks)), {"good": prompts["good"]}, **params)
    damage_token(ranks[0], BAD_TOKEN)
    engine = make_engine(StagesInARow(ranks, epoch=2), epoch=2)
    outputs = run_all(engine, prompts, **params)
    assert ids(outputs["good"]) == ids(expected["good"])
    assert outputs["bad"][-1] == SequenceOutput(sequence_id="bad", finish_reason=CORRUPT)
    assert engine.scheduler.counters.num_corrupt == 1
    engine.add_probe()
    assert engine.step() == [], "the probe holds no such token, so the rank lives"


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("broken", "where"),
    [("stage 0", "stage 0 turned a probe"), ("stage 1", "stage 1 turned a probe"), ("head", "the head turned a probe")],
)
def test_the_stage_whose_weights_are_not_finite_ends_by_the_probe(folder: Path, broken: str, where: str) -> None:
    ranks = load_stages(stage_config(folder, num_stages=2))
    if broken == "head":
        damage_head(ranks[1])
    else:
        damage_norm(ranks[int(broken[-1])])
    engine = make_engine(StagesInARow(ranks))
    engine.add_probe()
    with pytest.raises(CorruptRank, match=where):
        engine.step()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("order", [["bad", "good"], ["good", "bad"]], ids=str)
def test_a_nan_spreads_neither_in_its_step_nor_to_later_owners_of_its_blocks(folder: Path, order: list[str]) -> None:
    # 6 blocks of 16: the bad sequence uses two or three of them. Later sequences reuse these blocks and fill them
    # partly.
    prompts = {"bad": [BAD_TOKEN, *range(20, 53)], "good": [3, 4, 5]}
    later = {f"later {number}": [30 + number, 31, 32, 33, 34] for number in range(4)}
    ranks = load_stages(stage_config(folder))
    expected = run_all(make_engine(StagesInARow(ranks)), {"good": prompts["good"], **later})
    damage_token(ranks[0], BAD_TOKEN)
    engine = make_engine(StagesInARow(ranks, epoch=2), epoch=2)
    first = run_all(engine, {name: prompts[name] for name in order})
    second = run_all(engine, later)
    assert first["bad"][-1].finish_reason == CORRUPT
    assert ids(first["good"]) == ids(expected["good"])
    assert {name: ids(second[name]) for name in later} == {name: ids(expected[name]) for name in later}


@pytest.mark.usefixtures("backend")
def test_a_nan_does_not_outlive_an_aborted_prompt(folder: Path) -> None:
    ranks = load_stages(stage_config(folder))
    damage_token(ranks[0], BAD_TOKEN)
    engine = make_engine(StagesInARow(ranks))
    engine.add(make_sequence("bad", [BAD_TOKEN, *range(20, 60)], max_tokens=1))  # a step computes 24 tokens
    assert engine.step() == []
    engine.abort("bad")
    outputs = run_all(engine, {"good": [3, 4, 5]})
    assert outputs["good"][-1].finish_reason == "length"


@pytest.mark.usefixtures("backend")
def test_a_prompt_row_that_is_not_finite_fails_a_request_whose_last_row_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = load_stages(stage_config(folder))
    model = ranks[0].loaded.model
    forward = model.forward

    def damaged(*arguments: Any) -> torch.Tensor:
        hidden_TD = forward(*arguments)
        if len(hidden_TD) > 1:
            hidden_TD[0] = NAN
        return hidden_TD

    monkeypatch.setattr(model, "forward", damaged)
    prompt = {"bad": list(range(20, 30))}
    assert ids(run_all(make_engine(StagesInARow(ranks)), prompt)["bad"]), "the last row is finite"
    outputs = run_all(make_engine(StagesInARow(ranks, epoch=2), epoch=2), prompt, prompt_logprobs=1)
    assert outputs["bad"] == [SequenceOutput(sequence_id="bad", finish_reason=CORRUPT)]
