"""Sampling: each rule on logits small enough to check by hand. Draws depend only on logits, seed and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rayloom_engine.worker.noise import GumbelNoise, mix, noise_key
from rayloom_engine.worker.sampler import Sampler, _kept_token_ids, adjust_logits, token_logprobs
from rt_slots import make_slot

CPU = torch.device("cpu")


def _draw(logits: list[float], num: int = 2000, **params) -> list[float]:
    """Returns the relative frequency of each token over `num` seeds."""
    sampler = Sampler(len(logits), CPU)
    counts = [0] * len(logits)
    for seed in range(num):
        (token,) = sampler(torch.tensor([logits]), [make_slot(seed=seed, **params)])
        counts[token] += 1
    return [count / num for count in counts]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen(temperature: float) -> None:
    sampler = Sampler(40, CPU)
    chosen = set()
    for seed in range(50):
        slot = make_slot(seed=seed, temperature=temperature, logit_bias=((39, 50.0),))
        slot.allowed = np.array([0b1001, 0b10], dtype=np.int32)  # the tokens 0, 3 and 33
        chosen.update(sampler((torch.arange(40.0) * (0.01 if temperature else 1.0))[None], [slot]))
    assert chosen == ({33} if temperature == 0.0 else {0, 3, 33})


def test_mixer_is_splitmix64() -> None:
    # First outputs of SplitMix64 with seed 1234567, from its reference implementation.
    golden, state = 0x9E3779B97F4A7C15, 1234567
    assert [mix(state + golden * step) for step in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_noise_of_a_subset_is_the_noise_of_all() -> None:
    noise = GumbelNoise(100, CPU)
    ids = torch.tensor([3, 99, 0])
    assert torch.equal(noise(7, 5, ids), noise(7, 5)[ids])


def test_noise_differs_by_seed_position_and_token() -> None:
    noise = GumbelNoise(1000, CPU)
    assert len(set(noise(1, 1).tolist())) > 990
    assert noise_key(1, 2) != noise_key(2, 1)
    assert not torch.equal(noise(1, 1), noise(1, 2))
    assert not torch.equal(noise(1, 1), noise(2, 1))


def test_noise_is_standard_gumbel() -> None:
    values = torch.cat([GumbelNoise(50_000, CPU)(seed, 0) for seed in range(4)])
    assert torch.isfinite(values).all()
    assert values.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_frequencies_follow_the_softmax() -> None:
    shares = _draw([math.log(0.5), math.log(0.3), math.log(0.2)])
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.04)


def test_temperature_sharpens() -> None:
    # p ** 2 normalised: 0.25, 0.09, 0.04 of 0.38.
    shares = _draw([math.log(0.5), math.log(0.3), math.log(0.2)], temperature=0.5)
    assert shares == pytest.approx([0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38], abs=0.04)


def test_the_same_request_draws_the_same_whatever_else_is_in_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 40)
    sampler = Sampler(40, CPU)
    slots = [
        make_slot(seed=3),
        make_slot(temperature=0.0),
        make_slot(seed=4, top_p=0.5),
        make_slot(seed=5, top_k=3, repetition_penalty=2.0),
        make_slot(seed=6, min_p=0.2, logit_bias=((1, 2.0),)),
    ]
    together = sampler(logits.clone(), slots)
    alone = [sampler(logits[row : row + 1].clone(), [slot])[0] for row, slot in enumerate(slots)]
    assert together == alone


def test_the_draw_depends_on_the_position_not_on_how_it_was_reached() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(40, CPU)
    grown = make_slot(prompt=(1, 2), seed=9)
    for token in (3, 4):
        grown.append_tokens((token,))
    replayed = make_slot(prompt=(1, 2), generated=(3, 4), seed=9)
    assert sampler(logits.clone(), [grown]) == sampler(logits.clone(), [replayed])


LOGITS = torch.tensor([1.0, 4.0, 2.0, 3.0])  # descending: 1, 3, 2, 0; softmax 0.644 0.237 0.087 0.032


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, None),
        (4, 1.0, 0.0, None),
        (2, 1.0, 0.0, [1, 3]),
        (1, 1.0, 0.0, [1]),
        (0, 0.64, 0.0, [1]),
        (0, 0.65, 0.0, [1, 3]),
        (0, 0.89, 0.0, [1, 3, 2]),
        (0, 1e-9, 0.0, [1]),
        (0, 0.0, 0.0, [1]),
        (0, 1.0, 0.3, [1, 3]),  # 0.237 >= 0.3 * 0.644 = 0.193
        (0, 1.0, 0.4, [1]),
        (0, 1.0, 1.0, [1]),
        (3, 0.9, 0.0, [1, 3]),  # probabilities of the three tokens that top_k keeps: 0.665 0.245 0.090
        (3, 0.92, 0.3, [1, 3]),
    ],
)
def test_filters_keep_the_right_tokens(top_k: int, top_p: float, min_p: float, kept: list[int] | None) -> None:
    ids = _kept_token_ids(LOGITS, top_k, top_p, min_p)
    assert (None if ids is None else ids.tolist()) == kept


@pytest.mark.parametrize(
    ("top_p", "min_p"), [(0.5, 0.0), (0.9, 0.0), (0.999, 0.0), (1.0, 0.01), (0.9, 0.001), (0.7, 1e-9)]
)
def test_looking_at_the_few_most_likely_tokens_first_changes_nothing(top_p: float, min_p: float) -> None:
    for spread in (0.05, 1.0, 4.0):  # flat distributions, which keep thousands of tokens, and steep ones
        logits = torch.randn(5000, generator=torch.Generator().manual_seed(5)) * spread
        probs = logits.double().softmax(dim=-1)
        order = probs.argsort(descending=True)
        allowed = [i for i in order.tolist() if probs[i] >= min_p * probs[order[0]]]
        total = probs[allowed].sum()
        expected, before = [], 0.0
        for token in allowed:
            if before < top_p or top_p == 1.0:
                expected.append(token)
            before += (probs[token] / total).item()
        got = _kept_token_ids(logits, 0, top_p, min_p)
        assert got is not None
        assert abs(len(set(got.tolist()) ^ set(expected))) <= 1  # a sum may round to either side of the limit


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0])
    adjust_logits(logits, make_slot(prompt=(0, 0), generated=(1,), repetition_penalty=2.0))
    assert logits.tolist() == [1.0, -4.0, 2.0, -2.0]


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = torch.zeros(4)
    adjust_logits(logits, make_slot(prompt=(3,), generated=(1, 1, 2), presence_penalty=0.5, frequency_penalty=1.0))
    assert logits.tolist() == [0.0, -2.5, -1.5, 0.0]


def test_logit_bias_is_added() -> None:
    logits = torch.zeros(3)
    adjust_logits(logits, make_slot(logit_bias=((0, -100.0), (2, 5.0))))
    assert logits.tolist() == [-100.0, 0.0, 5.0]


def test_the_end_cannot_be_chosen_before_min_tokens() -> None:
    sampler = Sampler(3, CPU)
    logits = torch.tensor([[9.0, 1.0, 5.0]])
    before = make_slot(generated=(1,), eos=(0,), stop_token_ids=(2,), min_tokens=2, temperature=0.0)
    after = make_slot(generated=(1, 1), eos=(0,), stop_token_ids=(2,), min_tokens=2, temperature=0.0)
    assert sampler(logits.clone(), [before]) == [1]
    assert sampler(logits.clone(), [after]) == [0]


def test_logprobs_are_of_the_raw_distribution_with_rank_and_tops() -> None:
    probabilities = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    first, second = token_logprobs(probabilities.log(), [2, 2], [2, 0])
    assert first.rank == 2
    assert first.logprob == pytest.approx(math.log(0.3))
    assert [token for token, _ in first.top] == [1, 2]
    assert (second.rank, second.top) == (1, ())
