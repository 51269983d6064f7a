"""The steps of a beam search, on trees of tokens that are small enough for a complete search."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.front.generation.beams import Beam, BeamSettings, PromptSearch

A, B, END = 0, 1, 2
Table = dict[tuple[int, ...], Sequence[float]]  # ids so far -> probabilities of A, B, END


def entry(probabilities: Sequence[float]) -> TokenLogprobs:
    top = sorted(((token, math.log(each)) for token, each in enumerate(probabilities)), key=lambda pair: -pair[1])
    return TokenLogprobs(top[0][0], top[0][1], 1, tuple(top))


def search(beams: PromptSearch, table: Table) -> list[tuple[tuple[int, ...], float]]:
    while beams.is_open:
        beams.advance([entry(table[beam.token_ids]) for beam in beams.live])
    return [(beam.token_ids, beam.logprob) for beam in beams.answers()]


def test_a_worse_first_token_may_lead_to_the_better_answer() -> None:
    table: Table = {(): (0.6, 0.3, 0.1), (A,): (0.4, 0.35, 0.25), (B,): (0.05, 0.9, 0.05)}
    for width, best in ((1, (A, A)), (2, (B, B))):  # 0.6 x 0.4 = 0.24 < 0.3 x 0.9 = 0.27
        settings = BeamSettings(width=width, max_tokens=2, stop_ids={END}, length_penalty=0.0)
        assert search(PromptSearch(settings=settings, prompt_len=1), table)[0][0] == best


def test_a_stop_token_ends_a_beam_but_not_before_min_tokens() -> None:
    table: Table = {(): (0.2, 0.1, 0.7), (A,): (0.2, 0.1, 0.7), (B,): (0.3, 0.3, 0.4)}
    settings = BeamSettings(width=1, max_tokens=2, stop_ids={END}, length_penalty=0.0)
    beams = PromptSearch(settings=settings, prompt_len=1)
    assert search(beams, table) == [((END,), math.log(0.7))]
    assert beams.answers()[0].stop_id == END
    settings = BeamSettings(width=1, max_tokens=2, min_tokens=1, stop_ids={END}, length_penalty=0.0)
    assert search(PromptSearch(settings=settings, prompt_len=1), table)[0][0] == (A, END)


def test_the_length_penalty_decides_between_short_and_long() -> None:
    # END at once: log 0.3 = -1.20. A A: log 0.5 + log 0.5 = -1.39. The lengths with the prompt's token are 1 and 3.
    table: Table = {(): (0.5, 0.2, 0.3), (A,): (0.5, 0.4, 0.1), (B,): (0.4, 0.4, 0.2)}
    for penalty, best in ((0.0, (END,)), (1.0, (A, A))):
        settings = BeamSettings(width=2, max_tokens=2, stop_ids={END}, length_penalty=penalty)
        assert search(PromptSearch(settings=settings, prompt_len=1), table)[0][0] == best


def test_entries_are_kept_with_rank_and_as_many_alternatives_as_the_answer_shows() -> None:
    settings = BeamSettings(width=2, max_tokens=1, length_penalty=0.0, num_top=1)
    beams = PromptSearch(settings=settings, prompt_len=1)
    search(beams, {(): (0.6, 0.3, 0.1)})
    best = (A, math.log(0.6))
    assert [beam.entries for beam in beams.answers()] == [
        (TokenLogprobs(A, math.log(0.6), 1, (best,)),),
        (TokenLogprobs(B, math.log(0.3), 2, (best,)),),
    ]


def test_a_step_asks_for_enough_tokens_that_the_width_remains_without_stop_tokens() -> None:
    assert BeamSettings(width=2, max_tokens=1, stop_ids={END}).num_alternatives == 4
    assert BeamSettings(width=1, max_tokens=1, stop_ids={5, 6, 7}).num_alternatives == 4


def test_a_step_copies_only_the_beams_that_stay() -> None:
    # 32 beams with 160 alternatives each have 5,120 continuations of 16 KB. Of these, only 32 unfinished and 32 ended
    # beams stay.
    settings = BeamSettings(width=32, max_tokens=4000, stop_ids=frozenset(range(128)))
    tree = PromptSearch(settings=settings, prompt_len=1, live=[Beam(token_ids=(200,) * 2000)] * 32)
    top = tuple((token, -1.0 - token) for token in range(settings.num_alternatives))
    tracemalloc.start()
    tree.advance([TokenLogprobs(0, -1.0, 1, top)] * 32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert {len(beam.token_ids) for beam in (*tree.live, *tree.finished)} == {2001}
    assert peak < 4e6


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Probabilities after every beginning of up to 2 tokens."""
    beginnings: list[tuple[int, ...]] = [()]
    for beginning in beginnings:
        if len(beginning) < 2:
            beginnings += [(*beginning, A), (*beginning, B)]
    table: Table = {}
    for beginning in beginnings:
        weights = [draw(st.integers(1, 100)) for _ in range(3)]
        table[beginning] = [weight / sum(weights) for weight in weights]
    return table


@given(table=tables(), penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]), prompt_len=st.integers(1, 9))
def test_a_search_as_wide_as_the_tree_finds_the_best_of_all_answers(
    table: Table, penalty: float, prompt_len: int
) -> None:
    """Also shows that the search does not end too early."""
    answers: dict[tuple[int, ...], float] = {}
    for beginning, probabilities in table.items():
        chance = math.prod(table[beginning[:place]][token] for place, token in enumerate(beginning))
        for token, each in enumerate(probabilities):
            if token == END or len(beginning) == 2:
                answers[(*beginning, token)] = math.log(chance * each)
    scores = {ids: sum_ / (prompt_len + len(ids) - (ids[-1] == END)) ** penalty for ids, sum_ in answers.items()}
    settings = BeamSettings(width=8, max_tokens=3, stop_ids={END}, length_penalty=penalty)
    found = search(PromptSearch(settings=settings, prompt_len=prompt_len), table)
    expected = sorted(scores.values(), reverse=True)[:8]
    assert [round(scores[ids], 9) for ids, _ in found] == [round(score, 9) for score in expected]
