"""The sampler for GPUs: ids equal to those of worker/sampler.py for random settings, and numbers checked by hand.

Blocks are small, so that a row has several blocks, and the last block is not full.
"""

from __future__ import annotations

import gc
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rayloom_engine.kernels.sampling import triton_gpu
from rayloom_engine.kernels.sampling.triton_gpu import Blocks
from rayloom_engine.worker.gpu_sampler import GpuSampler
from rayloom_engine.worker.noise import GumbelNoise
from rayloom_engine.worker.sampler import Sampler, adjust_logits, token_logprobs
from rayloom_engine.worker.slots import Slot
from rayloom_engine.worker.thinking import mask_of
from rayloom_engine.worker.torch_computation import choose_sampler
from rt_sampling import assert_same_choice, kept_in_order, random_logits, random_mask, random_params, random_slot
from rt_slots import make_slot
from rt_triton import DEVICE, target

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
VOCAB_SIZES = [1, 2, 15, 33, 64, 300]


def sampler_of(vocab_size: int, block: int = 64) -> GpuSampler:
    return GpuSampler(vocab_size, DEVICE, Blocks(block))


def tokens(logits: torch.Tensor, slots: list[Slot], block: int = 64) -> list[int | None]:
    """The tokens that the sampler chooses from rows of logits. The logits are not changed."""
    return sampler_of(logits.shape[1], block)(logits.clone().to(DEVICE), slots)


@settings(max_examples=25, deadline=None)
@given(vocab_size=st.sampled_from(VOCAB_SIZES), block=st.sampled_from([16, 64, 512]), data=st.data())
def test_any_settings_choose_the_token_of_the_reference(vocab_size: int, block: int, data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    rows = []
    slots = []
    for _ in range(data.draw(st.integers(1, 3))):
        spread = data.draw(st.sampled_from([0.01, 1.0, 3.0, 10.0]))
        logits = random_logits(vocab_size, rng.randrange(2**32), spread)
        for _ in range(rng.choice([0, 3])):
            logits[0, rng.randrange(vocab_size)] = -INF
        slot = random_slot(vocab_size, rng, data.draw(random_params(vocab_size)))
        slot.allowed = random_mask(vocab_size, rng, data.draw(st.sampled_from(["all", "few", "most"])))
        adjusted_V = logits[0].clone()
        adjust_logits(adjusted_V, slot)
        assume(bool(adjusted_V.isfinite().any()))  # else any token may be chosen
        rows.append(logits)
        slots.append(slot)
    logits = torch.cat(rows)
    expected = Sampler(vocab_size, CPU)(logits.clone(), slots)
    for found, wanted, row, slot in zip(tokens(logits, slots, block), expected, logits, slots, strict=True):
        assert_same_choice(found, wanted, row, slot)


def test_each_row_of_a_draft_has_its_own_mask_and_counts() -> None:
    vocab_size = 40
    masks = [mask_of(token_id, vocab_size) | mask_of(token_id + 1, vocab_size) for token_id in (3, 20, 38)]
    masks[1] = np.concatenate([masks[1], np.full(5, -1, dtype=np.int32)])  # a tokenizer with more tokens
    for params in ({"temperature": 0.0}, {"frequency_penalty": 2.0, "top_p": 0.9}, {"repetition_penalty": 1.5}):
        slot = make_slot((1, 2), (3, 20), seed=5, **params)
        slot.write_draft((20, 39, 7))
        slots = [slot, *(slot.after_draft(num) for num in (1, 2, 3))]
        for row, mask in zip(slots, masks, strict=False):  # the last row has no mask, as behind an illegal token
            row.allowed = mask
        logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(2))
        found = tokens(logits, slots)
        assert found == Sampler(vocab_size, CPU)(logits.clone(), slots)
        assert [found[0] in (3, 4), found[1] in (20, 21), found[2] in (38, 39)] == [True] * 3


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3, "top_p": 0.95},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_many_seeds_choose_the_tokens_of_the_reference(params: dict[str, Any]) -> None:
    vocab_size = 200
    num_seeds = 20 if {"top_p", "top_k", "min_p"} & params.keys() else 60  # the interpreter is slow for these filters
    logits = torch.randn(num_seeds, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    slots = [make_slot((5, 6, 7), (7, 7, 8), seed=1000 * row + 1, **params) for row in range(num_seeds)]
    assert tokens(logits, slots, block=256) == Sampler(vocab_size, CPU)(logits.clone(), slots)


@settings(max_examples=20, deadline=None)
@given(
    logits=st.lists(st.integers(-3, 3), min_size=2, max_size=90),
    seed=st.integers(0, 2**63 - 1),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.1234, 0.5678, 0.9123, 1.0]),  # no sum of the probabilities is exactly one of these values
    min_p=st.sampled_from([0.0, 0.03, 0.3]),
)
def test_of_equal_logits_the_lowest_ids_are_kept(
    logits: list[int], seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    slot = make_slot(seed=seed, top_k=min(top_k, len(logits)), top_p=top_p, min_p=min_p)
    kept = kept_in_order([float(x) for x in logits], slot.params.top_k, top_p, min_p)
    scores = torch.tensor(logits, dtype=torch.float32) + GumbelNoise(len(logits), CPU)(seed, slot.num_tokens)
    expected = max(kept, key=lambda i: scores[i].item())
    assert tokens(torch.tensor([logits], dtype=torch.float32), [slot], block=16) == [expected]


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
        (3, 0.9, 0.0, {1, 3}),  # probabilities of the three that top_k keeps: 0.665 0.245 0.090
        (3, 0.92, 0.3, {1, 3}),
    ],
)
def test_filters_keep_the_right_tokens(top_k: int, top_p: float, min_p: float, kept: set[int]) -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])  # descending: 1, 3, 2, 0; softmax 0.644 0.237 0.087 0.032
    slots = [make_slot(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p) for seed in range(300)]
    expected = Sampler(4, CPU)(logits.expand(300, 4).clone(), slots)
    assert set(expected) == kept
    # The first seed that draws each kept token, and the first eight seeds.
    rows = sorted({expected.index(token_id) for token_id in kept} | set(range(8)))
    assert tokens(logits.expand(len(rows), 4), [slots[row] for row in rows]) == [expected[row] for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_of_the_highest_logits_is_chosen(temperature: float) -> None:
    logits = torch.zeros(1, 200)
    logits[0, [77, 78, 150]] = 3.0
    slots = [make_slot(temperature=temperature, top_k=1, seed=seed) for seed in range(6)]
    assert tokens(logits.expand(6, 200), slots) == [77] * 6


@pytest.mark.parametrize(
    "row", [[0.0, NAN, 1.0], [NAN, NAN, NAN], [0.0, INF, 1.0], [-INF, -INF, -INF], [NAN, INF, -INF]]
)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5, "top_k": 2}], ids=str)
def test_no_token_is_chosen_from_a_row_that_is_not_finite(row: list[float], params: dict[str, Any]) -> None:
    logits = torch.tensor([row, [0.0, -INF, 9.0]])
    assert tokens(logits, [make_slot(**params), make_slot(temperature=0.0)]) == [None, 2]


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
        ([1.0, 2.0, 9.0], {"min_tokens": 3, "stop_token_ids": (2,), "logit_bias": ((2, 5.0),)}, 1),
        ([1.0, 2.0, 9.0], {"min_tokens": 2, "stop_token_ids": (2,)}, 2),
    ],
)
def test_adjustments_of_logits_by_hand(logits: list[float], params: dict[str, Any], chosen: int) -> None:
    generated = () if "repetition_penalty" in params else (2, 2)
    slot = make_slot(prompt=(0, 0), generated=generated, temperature=0.0, **params)
    assert tokens(torch.tensor([logits]), [slot]) == [chosen]


def test_few_banned_tokens_of_a_large_vocabulary_are_banned_one_by_one() -> None:
    logits = torch.zeros(1, 300)
    logits[0, [7, 250]] = torch.tensor([2.0, 1.0])
    slot = make_slot(eos=(7,), min_tokens=3, temperature=0.0, logit_bias=((7, 50.0),))
    assert tokens(logits, [slot]) == [250]


def test_counts_follow_a_sequence_and_its_row_is_used_again() -> None:
    vocab_size = 50
    sampler = sampler_of(vocab_size)
    reference = Sampler(vocab_size, CPU)
    settings = {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.4}
    for seed in range(3):  # each sequence frees its row for the next sequence
        slots = [make_slot((1, 2, 2), seed=10 * seed + n, max_tokens=50, **settings) for n in range(3)]
        for step in range(4):
            logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(step))
            expected = reference(logits.clone(), slots)
            assert sampler(logits.clone().to(DEVICE), slots) == expected
            for slot, token_id in zip(slots, expected, strict=True):
                slot.append_tokens((token_id,) if step != 1 else (token_id, token_id))
        del slots, slot
        gc.collect()
    assert sampler._counts.table_RV.shape[0] == 4


def test_a_replayed_sequence_gets_the_same_token() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    grown = make_slot(prompt=(1, 2), seed=9, frequency_penalty=1.0)
    sampler = sampler_of(40)
    sampler(logits.clone().to(DEVICE), [grown])
    for token in (3, 4):
        grown.append_tokens((token,))
    replayed = make_slot(prompt=(1, 2), generated=(3, 4), seed=9, frequency_penalty=1.0)
    assert sampler(logits.clone().to(DEVICE), [grown]) == tokens(logits, [replayed])


def test_a_row_does_not_depend_on_its_batch() -> None:
    vocab_size = 130
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(0))
    rng = random.Random(0)
    options: list[dict] = [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3, "repetition_penalty": 2.0}]
    slots = [random_slot(vocab_size, rng, {"seed": row, **options[row % 4]}) for row in range(8)]
    alone = [tokens(logits[row : row + 1], [slot])[0] for row, slot in enumerate(slots)]
    assert tokens(logits, slots) == alone


def test_logprobs_by_hand() -> None:
    probabilities = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    first, second = sampler_of(3).describe(probabilities.log().to(DEVICE), [2, 1], [2, 0])
    assert first.rank == 2
    assert first.logprob == pytest.approx(math.log(0.3))
    assert first.top == ((1, pytest.approx(math.log(0.6))), (2, pytest.approx(math.log(0.3))))
    assert (second.rank, second.top) == (2, ())


@settings(max_examples=20, deadline=None)
@given(
    vocab_size=st.sampled_from(VOCAB_SIZES),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    num_top=st.integers(0, 20),
    place=st.floats(0, 1, exclude_max=True),
    has_banned=st.booleans(),
)
def test_logprobs_are_those_of_the_reference(
    vocab_size: int, seed: int, spread: float, num_top: int, place: float, has_banned: bool
) -> None:
    logits = random_logits(vocab_size, seed, spread)
    token_id = int(place * vocab_size)
    if has_banned and token_id:
        logits[0, :token_id] = -INF  # the banned tokens may fill whole blocks
    (found,) = sampler_of(vocab_size, block=16).describe(logits.to(DEVICE), [token_id], [num_top])
    (expected,) = token_logprobs(logits, [token_id], [num_top])
    assert (found.token_id, found.rank, len(found.top)) == (expected.token_id, expected.rank, len(expected.top))
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert [value for _, value in found.top] == pytest.approx([value for _, value in expected.top], abs=1e-5)


def test_a_warm_up_launches_every_kernel_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set()
    kernels = {name: value for name, value in vars(triton_gpu).items() if name.endswith("_kernel")}
    for name, kernel in kernels.items():

        class Counted:
            def __init__(self, name: str, kernel: Any) -> None:
                self.name = name
                self.kernel = kernel

            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                launched.add(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(triton_gpu, name, Counted(name, kernel))
    sampler = sampler_of(70)
    sampler.warm_up()
    gc.collect()
    assert launched == kernels.keys() and len(launched) == 7
    assert len(sampler._counts._free) == sampler._counts.table_RV.shape[0]


def test_the_triton_sampler_samples_where_triton_computes_the_model() -> None:
    assert isinstance(choose_sampler(9, target("triton")), GpuSampler)
    assert isinstance(choose_sampler(9, target("plain")), Sampler)
