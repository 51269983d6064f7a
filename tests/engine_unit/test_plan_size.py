"""The bytes of a plan whose choices share a long prompt: the plan has the prompt once, and little for each choice."""

from __future__ import annotations

import msgspec
import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import SampledToken, StepPlan, StepResult
from rayloom_engine.worker.slots import SlotTable
from rt_scheduler import SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence, run_to_end

NUM_CHOICES = 64
NUM_PROMPT = 16_000  # the largest number of tokens that a step computes at any context
BYTES_PER_CHOICE = 1_000


def _size(plan: StepPlan) -> int:
    return len(msgspec.msgpack.encode(plan))


def _scheduler():
    return make_scheduler(
        num_blocks=8_000, max_num_seqs=NUM_CHOICES, max_num_batched_tokens=NUM_PROMPT, max_model_len=NUM_PROMPT + 10
    )


def _add_choices(scheduler, prompt: tuple[int, ...], num: int, generated=None) -> None:
    for index in range(num):
        scheduler.add(
            make_sequence(
                f"{index}",
                prompt,
                params=DecodingParams(max_tokens=4, temperature=1.0, seed=index),
                fork_of="0" if index and generated is None else None,
                generated_ids=generated[index] if generated else (),
            ),
            is_resume=True,
        )


class _Slots:
    """A rank's table of slots without a model. The sampled token is the number of the slot."""

    def __init__(self) -> None:
        self.table = SlotTable(epoch=0)

    def run(self, plan: StepPlan) -> StepResult:
        steps = self.table.apply(plan)
        sampled = tuple(SampledToken(step.slot, step.slot) for step, _ in steps if step.samples)
        return StepResult(step_id=plan.step_id, epoch=0, sampled=sampled)


def test_the_plan_of_64_choices_has_their_prompt_once() -> None:
    prompt = tuple(index % 30_000 + 300 for index in range(NUM_PROMPT))  # three bytes each
    scheduler, rank = _scheduler(), _Slots()
    _add_choices(scheduler, prompt, NUM_CHOICES)
    first = scheduler.schedule()
    assert 3 * NUM_PROMPT < _size(first) < 4 * NUM_PROMPT + 20_000, "ids and block table"
    scheduler.update(rank.run(first))
    forks = scheduler.schedule()
    assert len(forks.new_slots) == NUM_CHOICES - 1
    assert _size(forks) < NUM_CHOICES * BYTES_PER_CHOICE
    table = tuple(range(NUM_PROMPT // 4))
    whole = [
        msgspec.structs.replace(new, prompt_of=None, num_shared_blocks=0, token_ids=prompt, block_table=table)
        for new in forks.new_slots
    ]
    size_of_whole = _size(msgspec.structs.replace(forks, new_slots=tuple(whole)))
    assert size_of_whole > 60 * 3 * NUM_PROMPT > 50 * _size(forks), "with prompt and table for every choice"
    for step, slot in rank.table.apply(forks):
        sequence = next(s for s in scheduler.running() if s.slot == step.slot)
        assert slot.token_ids[: slot.num_tokens].tolist() == sequence.token_ids
        assert rank.table.block_tables.of(step.slot).tolist() == sequence.block_ids


def test_after_lost_ranks_the_prompt_crosses_once_again() -> None:
    prompt = tuple(index % 30_000 + 300 for index in range(NUM_PROMPT))
    scheduler, rank = _scheduler(), _Slots()
    _add_choices(scheduler, prompt, NUM_CHOICES)
    for _ in range(3):
        scheduler.update(rank.run(scheduler.schedule()))
    scheduler.forget_ranks()
    rank = _Slots()
    sizes = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        sizes.append(_size(plan))
        scheduler.update(rank.run(plan))
        scheduler.check_integrity()
        for sequence in scheduler.running():
            if sequence.num_sent_tokens:
                slot = rank.table._slots[sequence.slot]
                assert slot.token_ids[: slot.num_tokens].tolist() == sequence.token_ids[: slot.num_tokens]
    assert sum(sizes) < 4 * NUM_PROMPT + 20_000 + 3 * NUM_CHOICES * BYTES_PER_CHOICE


@pytest.mark.parametrize("num_losses", [1, 2])
def test_choices_that_are_replayed_end_with_the_same_tokens(num_losses: int) -> None:
    """The prompt is cut into chunks, and the first choice is finished before a loss of ranks."""
    prompt = tuple(range(19))
    scheduler, rank = make_scheduler(30, max_num_batched_tokens=8, max_num_seqs=4), SimulatedRank()
    for index, num in enumerate((2, 6, 6, 6)):
        scheduler.add(make_sequence(f"{index}", prompt, max_tokens=num, fork_of="0" if index else None))
    outputs = []
    for _ in range(num_losses):
        for _ in range(4):
            outputs += scheduler.update(rank.run(scheduler.schedule()))
        scheduler.forget_ranks()
        rank.forget_all()
    outputs += run_to_end(scheduler, rank)
    for index, num in enumerate((2, 6, 6, 6)):
        assert ids_of(outputs, f"{index}") == expected_ids(prompt, num)


def test_a_choice_whose_first_one_was_preempted_carries_its_prompt_itself() -> None:
    prompt = tuple(range(6))
    scheduler, rank = make_scheduler(), SimulatedRank()
    scheduler.add(make_sequence("0", prompt, max_tokens=9))
    scheduler.update(rank.run(scheduler.schedule()))
    scheduler.restrict(frozenset({"1"}))  # "0" is preempted
    scheduler.add(make_sequence("1", prompt, max_tokens=9, fork_of="0"))
    plan = scheduler.schedule()
    [new] = plan.new_slots
    assert (plan.freed_slots, new.prompt_of, new.token_ids) == ((0,), None, prompt)
    scheduler.update(rank.run(plan))
    scheduler.restrict(None)
    plan = scheduler.schedule()
    [again] = plan.new_slots
    assert (again.request_id, again.prompt_of, again.num_shared_blocks) == ("0", new.slot, 1)
    assert again.token_ids == tuple(expected_ids(prompt, 1))
