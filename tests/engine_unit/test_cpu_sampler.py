"""The sampler of the C library: numbers checked by hand, and ids equal to worker/sampler.py's for random settings.

test_sampler.py tests the rules of worker/sampler.py itself.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rayloom_engine.cpu_library.library import CpuLibrary
from rayloom_engine.worker.cpu_sampler import CpuSampler
from rayloom_engine.worker.noise import GumbelNoise
from rayloom_engine.worker.sampler import Sampler, adjust_logits, token_logprobs
from rt_library import ISAS, open_library
from rt_sampling import assert_same_choice, kept_in_order, random_logits, random_mask, random_params, random_slot
from rt_slots import make_slot

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
BIG_VOCABS = [49_152, 151_936]


@pytest.fixture(scope="module", params=ISAS)
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return open_library(request.param, num_threads=1)


def _check_against_reference(library: CpuLibrary, vocab_size: int, data: st.DataObject) -> None:
    params = data.draw(random_params(vocab_size))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    logits = random_logits(vocab_size, rng.randrange(2**32), data.draw(st.sampled_from([0.01, 1.0, 3.0, 10.0])))
    for _ in range(rng.choice([0, 3])):
        logits[0, rng.randrange(vocab_size)] = -INF
    slot = random_slot(vocab_size, rng, params)
    slot.allowed = random_mask(vocab_size, rng, data.draw(st.sampled_from(["all", "few", "most"])))
    adjusted_V = logits[0].clone()
    adjust_logits(adjusted_V, slot)
    assume(bool(adjusted_V.isfinite().any()))  # else any token may be chosen
    (found,) = CpuSampler(library, vocab_size)(logits.numpy(), [slot])
    (expected,) = Sampler(vocab_size, CPU)(logits.clone(), [slot])
    if found is None or expected is None:
        assert found is expected
        return
    assert_same_choice(found, expected, logits[0], slot)


@settings(max_examples=150, deadline=None)
@given(vocab_size=st.sampled_from([1, 2, 15, 17, 64, 300, 1000]), data=st.data())
def test_any_settings_choose_the_token_of_the_reference(
    library: CpuLibrary, vocab_size: int, data: st.DataObject
) -> None:
    _check_against_reference(library, vocab_size, data)


@pytest.mark.parametrize("vocab_size", BIG_VOCABS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_large_vocabularies_choose_the_token_of_the_reference(
    library: CpuLibrary, vocab_size: int, data: st.DataObject
) -> None:
    _check_against_reference(library, vocab_size, data)


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-3, 3), min_size=2, max_size=90),
    seed=st.integers(0, 2**63 - 1),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.1234, 0.5678, 0.9123, 1.0]),  # no sum of the probabilities is exactly one of these values
    min_p=st.sampled_from([0.0, 0.03, 0.3]),
)
def test_of_equal_logits_the_lowest_ids_are_kept(
    library: CpuLibrary, logits: list[int], seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    vocab_size = len(logits)
    slot = make_slot(seed=seed, top_k=min(top_k, vocab_size), top_p=top_p, min_p=min_p)
    kept = kept_in_order([float(x) for x in logits], slot.params.top_k, top_p, min_p)
    noise = GumbelNoise(vocab_size, CPU)(seed, slot.num_tokens)
    scores = torch.tensor(logits, dtype=torch.float32) + noise
    expected = max(kept, key=lambda i: scores[i].item())
    assert CpuSampler(library, vocab_size)(np.array([logits], dtype=np.float32), [slot]) == [expected]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, {0, 1, 2, 3}),
        (4, 1.0, 0.0, {0, 1, 2, 3}),
        (2, 1.0, 0.0, {1, 3}),
        (1, 1.0, 0.0, {1}),
        (0, 0.64, 0.0, {1}),
        (0, 0.65, 0.0, {1, 3}),
        (0, 0.89, 0.0, {1, 3, 2}),
        (0, 0.0, 0.0, {1}),
        (0, 1.0, 0.3, {1, 3}),  # 0.237 >= 0.3 * 0.644 = 0.193
        (0, 1.0, 1.0, {1}),
        (3, 0.9, 0.0, {1, 3}),  # probabilities of the three tokens that top_k keeps: 0.665 0.245 0.090
        (3, 0.92, 0.3, {1, 3}),
    ],
)
def test_filters_keep_the_right_tokens(
    library: CpuLibrary, top_k: int, top_p: float, min_p: float, kept: set[int]
) -> None:
    logits = np.array(
        [[1.0, 4.0, 2.0, 3.0]], dtype=np.float32
    )  # descending: 1, 3, 2, 0; softmax 0.644 0.237 0.087 0.032
    sampler = CpuSampler(library, 4)
    slots = [make_slot(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p) for seed in range(300)]
    assert set(sampler(np.broadcast_to(logits, (300, 4)), slots)) == kept


def test_greedy_chooses_the_first_of_the_highest_logits(library: CpuLibrary) -> None:
    logits = np.zeros((1, 200), dtype=np.float32)
    logits[0, [77, 78, 150]] = 3.0
    assert CpuSampler(library, 200)(logits, [make_slot(temperature=0.0)]) == [77]


@pytest.mark.parametrize(
    "row", [[0.0, NAN, 1.0], [NAN, NAN, NAN], [0.0, INF, 1.0], [-INF, -INF, -INF], [NAN, INF, -INF]]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_chosen_from_a_row_that_is_not_finite(
    library: CpuLibrary, row: list[float], temperature: float
) -> None:
    logits = np.array([row, [0.0, -INF, 9.0]], dtype=np.float32)
    slots = [make_slot(temperature=temperature), make_slot(temperature=0.0)]
    sampler = CpuSampler(library, 3)
    assert sampler(logits, slots) == [None, 2]
    assert sampler.describe(logits, [0, 2], [2, 1])[1].rank == 1


def test_a_row_that_bans_all_its_finite_tokens_still_has_a_token(library: CpuLibrary) -> None:
    logits = np.array([[-INF, 5.0, -INF]], dtype=np.float32)
    slots = [make_slot(eos=(1,), min_tokens=5, temperature=temperature, top_p=0.9) for temperature in (0.0, 1.0)]
    assert CpuSampler(library, 3)(np.broadcast_to(logits, (2, 3)), slots) == [0, 0]


@pytest.mark.parametrize(
    ("logits", "params", "chosen"),
    [
        ([4.0, 3.0, 1.0], {"repetition_penalty": 1.5}, 1),  # 0 is in the prompt twice: 4 / 1.5 = 2.67 < 3
        ([4.0, 2.0, 1.0], {"repetition_penalty": 1.5}, 0),  # 2.67 > 2, because it is divided once
        ([-2.0, -3.0, -9.0], {"repetition_penalty": 2.0}, 1),  # -2 * 2 = -4 < -3
        ([1.0, 2.4, 3.0], {"presence_penalty": 0.5}, 2),  # 3 - 0.5 = 2.5
        ([1.0, 2.6, 3.0], {"presence_penalty": 0.5}, 1),
        ([1.0, 2.2, 3.0], {"frequency_penalty": 0.5}, 1),  # 2 was generated twice: 3 - 2 * 0.5 = 2
        ([1.0, 1.4, 3.0], {"frequency_penalty": 0.5, "presence_penalty": 0.5}, 2),  # 1.5
        ([9.0, 1.0, 2.0], {"logit_bias": ((0, -8.5), (1, 1.4))}, 1),  # 0.5 2.4 2
        ([1.0, 2.0, 9.0], {"min_tokens": 3, "stop_token_ids": (2,)}, 1),
        ([1.0, 2.0, 9.0], {"min_tokens": 2, "stop_token_ids": (2,)}, 2),
    ],
)
def test_adjustments_of_logits_by_hand(library: CpuLibrary, logits: list[float], params: dict, chosen: int) -> None:
    slot = make_slot(prompt=(0, 0), generated=(2, 2), temperature=0.0, **params)
    if "repetition_penalty" in params:
        slot = make_slot(prompt=(0, 0), temperature=0.0, **params)
    assert CpuSampler(library, 3)(np.array([logits], dtype=np.float32), [slot]) == [chosen]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen(library: CpuLibrary, temperature: float) -> None:
    slots = [make_slot(seed=seed, temperature=temperature, logit_bias=((39, 50.0),)) for seed in range(50)]
    for slot in slots:
        slot.allowed = np.array([0b1001, 0b10], dtype=np.int32)  # the tokens 0, 3 and 33
    logits = np.broadcast_to(np.arange(40, dtype=np.float32), (50, 40))
    expected = {33} if temperature == 0.0 else {0, 3, 33}
    assert set(CpuSampler(library, 40)(logits * np.float32(0.01) if temperature else logits, slots)) == expected


def test_a_row_does_not_depend_on_its_batch_or_the_number_of_threads(library: CpuLibrary) -> None:
    vocab_size = 500
    logits = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(0)).numpy()
    rng = random.Random(0)
    options: list[dict] = [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3, "repetition_penalty": 2.0}]
    slots = [random_slot(vocab_size, rng, {"seed": row, **options[row % 4]}) for row in range(40)]
    sampler = CpuSampler(library, vocab_size)
    alone = [sampler(logits[row : row + 1], [slot])[0] for row, slot in enumerate(slots)]
    tops = [row % 5 for row in range(40)]
    described = [sampler.describe(logits[row : row + 1], [row], [top])[0] for row, top in enumerate(tops)]
    try:
        for num_threads in (1, 3):
            library.start_threads(num_threads, pin=False)
            assert sampler(logits, slots) == alone
            assert sampler.describe(logits, list(range(40)), tops) == described
    finally:
        library.start_threads(1, pin=False)


def test_logits_are_left_as_they_are_and_may_lie_apart(library: CpuLibrary) -> None:
    wide = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)).numpy()
    logits = wide[:, 5:35]
    before = wide.copy()
    slots = [make_slot(seed=seed, repetition_penalty=2.0, logit_bias=((3, 1.0),)) for seed in range(3)]
    sampler = CpuSampler(library, 30)
    assert sampler(logits, slots) == sampler(logits.copy(), slots)
    assert np.array_equal(wide, before)


def test_logprobs_by_hand(library: CpuLibrary) -> None:
    probabilities = np.array([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], dtype=np.float32)
    first, second = CpuSampler(library, 3).describe(np.log(probabilities), [2, 1], [2, 0])
    assert first.rank == 2
    assert first.logprob == pytest.approx(math.log(0.3))
    assert first.top == ((1, pytest.approx(math.log(0.6))), (2, pytest.approx(math.log(0.3))))
    assert (second.rank, second.top) == (2, ())


@settings(max_examples=60, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 16, 63, 300, 5000, *BIG_VOCABS]),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    num_top=st.integers(0, 20),
    place=st.floats(0, 1, exclude_max=True),
)
def test_logprobs_are_those_of_the_reference(
    library: CpuLibrary, vocab_size: int, seed: int, spread: float, num_top: int, place: float
) -> None:
    logits = random_logits(vocab_size, seed, spread)
    token_id = int(place * vocab_size)
    (found,) = CpuSampler(library, vocab_size).describe(logits.numpy(), [token_id], [num_top])
    (expected,) = token_logprobs(logits, [token_id], [num_top])
    assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
    # torch sums a large vocabulary in float32, with errors above 1e-5.
    exact = logits[0].double().log_softmax(dim=-1)
    assert found.logprob == pytest.approx(exact[token_id].item(), abs=1e-5)
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert [value for _, value in found.top] == pytest.approx([exact[i].item() for i, _ in found.top], abs=1e-5)
    # torch orders alternatives with equal logits arbitrarily.
    assert [logits[0, i].item() for i, _ in found.top] == [logits[0, i].item() for i, _ in expected.top]


def test_alternatives_with_equal_logits_are_the_lowest_ids(library: CpuLibrary) -> None:
    logits = np.zeros((1, 100), dtype=np.float32)
    logits[0, 90] = 1.0
    (entry,) = CpuSampler(library, 100).describe(logits, [5], [3])
    assert [token_id for token_id, _ in entry.top] == [90, 0, 1]
    assert entry.rank == 2
