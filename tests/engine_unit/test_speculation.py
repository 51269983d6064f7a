"""Drafts in a scheduler's plans: the rules for adding them, and the treatment of their tokens."""

from __future__ import annotations

import pytest

from rayloom_engine.core.decoding import DecodingParams, ThinkingBudget
from rayloom_engine.core.planning.step_drafts import draft_cost
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.speculation.drafter import Drafter, SpeculationConfig
from rayloom_engine.core.step import SlotStep, StepPlan
from rayloom_engine.core.step_seconds import StepSeconds
from rt_scheduler import (
    POISON,
    VOCAB,
    GuessedGrammars,
    GuessingDrafter,
    SimulatedRank,
    expected_ids,
    ids_of,
    make_scheduler,
    make_sequence,
    run_to_end,
)

PROMPT = (1, 2, 3)
NGRAMS = SpeculationConfig(num_tokens=3, min_ngram=2, max_ngram=3)


def _scheduler(num_blocks: int = 11, *, is_right=(True,), num_tokens: int = 3, **other) -> Scheduler:
    settings = SpeculationConfig(num_tokens=num_tokens, min_ngram=2, max_ngram=3)
    return make_scheduler(
        num_blocks,
        speculation=settings,
        make_drafter=lambda: GuessingDrafter(is_right),
        **{"max_num_seqs": 16, **other},
    )


def _drafts(plan: StepPlan) -> list[int]:
    return [len(step.draft_token_ids) for step in plan.slots]


def _decoding(scheduler: Scheduler, rank: SimulatedRank, *sequences) -> list:
    """Adds the sequences and computes their prompts in one step."""
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler.update(rank.run(scheduler.schedule()))


def test_a_right_draft_gives_its_tokens_and_one_more_in_a_step() -> None:
    scheduler, rank = _scheduler(), SimulatedRank()
    outputs = _decoding(scheduler, rank, make_sequence("a", PROMPT, max_tokens=9))
    first, *following = expected_ids(PROMPT, 5)
    plan = scheduler.schedule()
    assert plan.slots == (
        SlotStep(
            slot=0,
            start=3,
            num_tokens=4,
            new_token_ids=(first,),
            new_block_ids=(1,),
            draft_token_ids=tuple(following[:3]),
            samples=True,
        ),
    )
    outputs += scheduler.update(rank.run(plan))
    assert ids_of(outputs, "a") == [first, *following]
    counters = scheduler.counters
    assert (counters.num_drafts, counters.draft_tokens, counters.accepted_tokens) == (1, 3, 3)
    assert ids_of(outputs + run_to_end(scheduler, rank), "a") == expected_ids(PROMPT, 9)


def test_a_wrong_draft_costs_rows_but_no_token() -> None:
    scheduler, rank = _scheduler(is_right=(False,)), SimulatedRank()
    scheduler.add(make_sequence("a", PROMPT, max_tokens=6))
    assert ids_of(run_to_end(scheduler, rank), "a") == expected_ids(PROMPT, 6)
    assert scheduler.counters.accepted_tokens == 0 < rank.num_rejected_tokens
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_accepted_tokens_fill_blocks_for_later_prompts_and_rejected_ones_do_not() -> None:
    scheduler, rank = _scheduler(is_right=(True, True, False)), SimulatedRank()
    scheduler.add(make_sequence("a", PROMPT, max_tokens=6))
    run_to_end(scheduler, rank)
    assert rank.num_accepted_tokens > 0 < rank.num_rejected_tokens
    scheduler.add(make_sequence("b", (*PROMPT, *expected_ids(PROMPT, 6)), max_tokens=1))
    run_to_end(scheduler, rank)
    assert scheduler.counters.prefix_hits == 8, "two blocks of four tokens; the rank has checked their content"


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "drafts"),
    [(4, 44, [2]), (3, 44, [1]), (2, 44, [0]), (9, 8, [3]), (9, 6, [1]), (9, 5, [0])],
)
def test_no_draft_is_longer_than_the_rest_of_the_answer(max_tokens, max_model_len, drafts) -> None:
    scheduler, rank = _scheduler(max_model_len=max_model_len), SimulatedRank()
    _decoding(scheduler, rank, make_sequence("a", PROMPT, max_tokens=max_tokens))
    assert _drafts(scheduler.schedule()) == drafts


def test_a_stop_token_inside_a_draft_ends_the_answer_there() -> None:
    stop = expected_ids(PROMPT, 3)[-1]
    scheduler, rank = _scheduler(), SimulatedRank()
    params = DecodingParams(max_tokens=9, temperature=0.0, stop_token_ids=(stop,))
    scheduler.add(make_sequence("a", PROMPT, params=params))
    outputs = run_to_end(scheduler, rank)
    assert ids_of(outputs, "a") == expected_ids(PROMPT, 3)
    assert [output.finish_reason for output in outputs] == [None, None, "stop"]
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_a_sequence_that_must_not_speculate_gets_no_draft() -> None:
    scheduler, rank = _scheduler(), SimulatedRank()
    plain = make_sequence("plain", (4, 5), max_tokens=9)
    other = make_sequence("other", PROMPT, params=DecodingParams(max_tokens=9, temperature=0.0, speculation=False))
    _decoding(scheduler, rank, plain, other)
    assert _drafts(scheduler.schedule()) == [3, 0]


class _OneAnswer(GuessedGrammars):
    """Grammars that return the same draft in every call, and record the drafts that they get."""

    def __init__(self, answer: tuple[int, ...] | None) -> None:
        """`answer`: the draft to return; None: the given draft, unchanged."""
        super().__init__()
        self._answer = answer
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    def fit(self, token_ids, draft, num):
        self.seen.append((tuple(token_ids), draft, num))
        return draft if self._answer is None else self._answer


FORM = DecodingParams(max_tokens=9, temperature=0.0, grammar="start: /.*/")
THINKING = DecodingParams(
    max_tokens=9, temperature=0.0, thinking=ThinkingBudget(num_tokens=1, start="", ends=("x",), end_ids=(1,))
)


@pytest.mark.parametrize(
    ("fitted", "drafts"), [(tuple(expected_ids(PROMPT, 2)[1:]), [1, 3]), ((), [0, 3])], ids=["legal prefix", "nothing"]
)
def test_a_draft_is_cut_to_the_tokens_that_the_grammar_of_its_sequence_allows(fitted, drafts) -> None:
    grammars = _OneAnswer(fitted)
    scheduler, rank = _scheduler(grammars=grammars), SimulatedRank()
    outputs = _decoding(
        scheduler, rank, make_sequence("a", PROMPT, params=FORM), make_sequence("b", (4, 5), params=THINKING)
    )
    first, *following = expected_ids(PROMPT, 4)
    plan = scheduler.schedule()
    assert grammars.seen == [((*PROMPT, first), tuple(following), 3)]
    assert _drafts(plan) == drafts, "a limit of reasoning cuts no draft"
    assert plan.num_tokens == 2 + sum(drafts), "tokens that were cut are not computed"
    outputs += scheduler.update(rank.run(plan))
    assert scheduler.counters.draft_tokens == sum(drafts)
    outputs += run_to_end(scheduler, rank)
    assert [ids_of(outputs, name) for name in "ab"] == [expected_ids(PROMPT, 9), expected_ids((4, 5), 9)]
    assert grammars.num_begun == 1
    assert grammars.num_steps >= len(grammars.seen), "each step has its own time for grammars"


def test_the_core_forgets_the_grammar_of_a_sequence_that_waits_again() -> None:
    grammars = _OneAnswer(None)
    scheduler, rank = _scheduler(grammars=grammars), SimulatedRank()
    sequence = make_sequence("a", PROMPT, params=FORM)
    outputs = _decoding(scheduler, rank, sequence)
    outputs += scheduler.update(rank.run(scheduler.schedule()))
    assert sequence.draft_grammar is not None
    scheduler.forget_ranks()
    assert sequence.draft_grammar is None
    outputs += run_to_end(scheduler, SimulatedRank())
    assert ids_of(outputs, "a") == expected_ids(PROMPT, 9)
    assert grammars.num_begun == 2


@pytest.mark.parametrize("nan_in_drafts", [False, True])
def test_a_draft_whose_mask_is_late_counts_neither_as_right_nor_as_wrong(nan_in_drafts: bool) -> None:
    builds = {"a": 0}
    scheduler = _scheduler(is_right=(False,), grammars=_OneAnswer(None))
    rank = SimulatedRank(build_steps=builds, nan_in_drafts=nan_in_drafts)
    prompt = next((n, 5) for n in range(99) if _is_dirty((n, 5)))
    sequence = make_sequence("a", prompt, params=FORM)
    outputs = _decoding(scheduler, rank, sequence)
    plan = scheduler.schedule()
    assert _drafts(plan) == [3]
    builds["a"] = 1
    result = rank.run(plan)
    assert (result.postponed_slots, result.dirty_slots) == ((0,), (0,) if nan_in_drafts else ())
    assert scheduler.update(result) == []
    scheduler.check_integrity()
    assert sequence.has_dirty_drafts == nan_in_drafts
    assert scheduler.counters.draft_tokens == 0
    assert sequence.drafter.acceptance.rate == 0.5
    outputs += run_to_end(scheduler, rank)
    assert ids_of(outputs, "a") == expected_ids(prompt, 9)


def _is_dirty(prompt: tuple[int, ...]) -> bool:
    """True if a wrong first draft token gives NaN on a rank with `nan_in_drafts`."""
    ids = [*prompt, *expected_ids(prompt, 1)]
    wrong = (expected_ids(ids, 1)[0] + 1) % VOCAB
    return expected_ids([*ids, wrong], 1)[0] % 3 == 0


def test_a_step_with_a_prompt_has_no_drafts() -> None:
    scheduler, rank = _scheduler(), SimulatedRank()
    _decoding(scheduler, rank, make_sequence("a", PROMPT, max_tokens=9))
    scheduler.add(make_sequence("b", (7, 8, 9), max_tokens=9))
    plan = scheduler.schedule()
    assert [step.num_tokens for step in plan.slots] == [1, 3]
    scheduler.update(rank.run(plan))
    assert _drafts(scheduler.schedule()) == [3, 3]


def test_the_search_for_a_poisonous_request_makes_no_drafts() -> None:
    scheduler, rank = _scheduler(), SimulatedRank()
    _decoding(scheduler, rank, make_sequence("a", PROMPT, max_tokens=9))
    scheduler.restrict(frozenset({"a"}))
    assert _drafts(scheduler.schedule()) == [0]


def test_drafts_take_what_the_budget_and_the_rows_of_logits_leave() -> None:
    pair = [make_sequence(name, (number, 5), max_tokens=9) for number, name in enumerate("ab")]
    small = _scheduler(max_num_batched_tokens=6)
    _decoding(small, SimulatedRank(), *pair)
    assert _drafts(small.schedule()) == [3, 1], "two decodes and four draft tokens"
    three = [make_sequence(name, (number, 5), max_tokens=9) for number, name in enumerate("abc")]
    few_rows = _scheduler(max_num_seqs=5)
    _decoding(few_rows, SimulatedRank(), *three)
    assert _drafts(few_rows.schedule()) == [2, 0, 0], "logits of five rows at most"
    one = _scheduler(max_num_seqs=1)
    _decoding(one, SimulatedRank(), make_sequence("a", PROMPT, max_tokens=9))
    assert _drafts(one.schedule()) == [3], "but one draft always has room"


def test_a_draft_takes_free_blocks_and_preempts_nobody() -> None:
    scheduler, rank = _scheduler(num_blocks=3, max_model_len=12), SimulatedRank()
    _decoding(scheduler, rank, make_sequence("a", (1, 2, 3), max_tokens=9), make_sequence("b", (4, 5), max_tokens=3))
    assert _drafts(scheduler.schedule()) == [3, 1], "the last free block is the older one's"
    assert scheduler.counters.num_preemptions == 0


def test_a_fork_copies_no_block_in_which_a_draft_is_verified() -> None:
    scheduler, rank = _scheduler(depth=2, is_right=(False,)), SimulatedRank(nan_in_drafts=True)
    prompt = (1, 2, 3, 4, 5)
    leader = make_sequence("a", prompt, max_tokens=9)
    scheduler.add(leader)
    outputs = scheduler.update(rank.run(scheduler.schedule()))
    verifying = scheduler.schedule()
    assert _drafts(verifying) == [3]
    assert leader.block_ids == [0, 1, 2]
    scheduler.add(make_sequence("b", leader.prompt_ids, max_tokens=3, fork_of="a"))
    joining = scheduler.schedule()
    assert joining.block_copies == (), "block 1 has tokens 4 to 7, of which three may be NaN"
    outputs += scheduler.update(rank.run(verifying)) + scheduler.update(rank.run(joining))
    outputs += run_to_end(scheduler, rank)
    assert [ids_of(outputs, name) for name in "ab"] == [expected_ids(prompt, 9), expected_ids(prompt, 3)]


def test_a_draft_that_gives_nan_ends_the_drafts_of_its_sequence_alone() -> None:
    scheduler, rank = _scheduler(30, is_right=(False,), num_tokens=5), SimulatedRank(nan_in_drafts=True)
    sequence = make_sequence("a", PROMPT, max_tokens=20)
    scheduler.add(sequence)
    scheduler.add(make_sequence("b", (9, POISON), max_tokens=20))
    outputs = run_to_end(scheduler, rank)
    assert sequence.has_dirty_drafts
    assert ids_of(outputs, "a") == expected_ids(PROMPT, 20)
    assert scheduler.counters.num_corrupt == 1, "only the other one"


def test_a_lost_rank_takes_the_draft_in_flight_along() -> None:
    scheduler, rank = _scheduler(), SimulatedRank()
    outputs = _decoding(scheduler, rank, make_sequence("a", PROMPT, max_tokens=9))
    assert _drafts(scheduler.schedule()) == [3]
    scheduler.forget_ranks()
    scheduler.check_integrity()
    outputs += run_to_end(scheduler, SimulatedRank())
    assert ids_of(outputs, "a") == expected_ids(PROMPT, 9)


def test_a_draft_token_costs_its_time_as_a_part_of_the_time_of_a_decode() -> None:
    costs = StepSeconds(decode_only=((1, 1.0), (8, 2.0)), token_s=0.1, pair_s=0.0, draft_token_s=0.125)
    assert draft_cost(1, costs) == 0.125
    assert draft_cost(8, costs) == 0.5, "a decode of eight takes 0.25 s"
    unmeasured = StepSeconds(decode_only=((1, 1.0),), token_s=0.1, pair_s=0.0)
    assert [draft_cost(num, unmeasured) < 1 for num in (1, 16, 17)] == [True, True, False]


def test_many_decodes_get_no_drafts() -> None:
    scheduler, rank = _scheduler(max_num_seqs=20, num_blocks=40, max_num_batched_tokens=60), SimulatedRank()
    _decoding(scheduler, rank, *(make_sequence(f"{number}", (number, 7), max_tokens=9) for number in range(17)))
    assert not any(_drafts(scheduler.schedule()))


def test_a_draft_token_that_costs_too_much_is_tried_every_64_steps() -> None:
    costs = StepSeconds(decode_only=((1, 1.0),), token_s=0.1, pair_s=0.0, draft_token_s=9.0)
    scheduler, rank = _scheduler(num_blocks=60, window=8), SimulatedRank(window=8)
    _decoding(scheduler, rank, make_sequence("a", PROMPT, max_tokens=200))
    drafts = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule(costs)
        drafts += _drafts(plan)
        scheduler.update(rank.run(plan))
    # 199 tokens after the first; each of the three accepted draft tokens saves a step.
    assert [step for step, num in enumerate(drafts, 1) if num] == [64, 128, 192]
    assert (sum(drafts), len(drafts)) == (3, 196)


def test_a_trial_searches_two_sequences_and_without_a_draft_the_next_trial_waits_for_eight_steps() -> None:
    searched = []

    class Searched(Drafter):
        def draft(self, token_ids, cost, most, fit=None):
            searched.append(token_ids[0])
            return ()

    costs = StepSeconds(decode_only=((1, 1.0),), token_s=0.1, pair_s=0.0, draft_token_s=9.0)
    scheduler = make_scheduler(80, speculation=NGRAMS, make_drafter=lambda: Searched(NGRAMS, 99))
    rank = SimulatedRank()
    _decoding(scheduler, rank, *(make_sequence(f"{number}", (number,), max_tokens=90) for number in range(3)))
    found = {}
    for step in range(1, 89):
        searched.clear()
        scheduler.update(rank.run(scheduler.schedule(costs)))
        if searched:
            found[step] = [*searched]
    assert found == {64: [0, 1], 72: [2, 0], 80: [1, 2], 88: [0, 1]}


def test_n_grams_of_the_sequence_itself_are_the_default() -> None:
    prompts = ((8, token, 5, other, 8) for token in range(VOCAB) for other in range(9))
    prompt = next(prompt for prompt in prompts if expected_ids(prompt, 1) == [prompt[1]])
    scheduler, rank = make_scheduler(speculation=NGRAMS), SimulatedRank()
    scheduler.add(make_sequence("a", prompt, max_tokens=9))
    outputs = scheduler.update(rank.run(scheduler.schedule()))
    plan = scheduler.schedule()
    assert [step.draft_token_ids for step in plan.slots] == [prompt[2:5]], "what followed the same two tokens"
    outputs += scheduler.update(rank.run(plan)) + run_to_end(scheduler, rank)
    assert ids_of(outputs, "a") == expected_ids(prompt, 9)
