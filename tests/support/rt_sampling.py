"""Random settings of requests for tests of samplers, and the comparison of a choice with worker/sampler.py."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import event
from hypothesis import strategies as st

from rayloom_engine.grammar.matcher import Mask
from rayloom_engine.worker.noise import GumbelNoise
from rayloom_engine.worker.sampler import _kept_token_ids, adjust_logits
from rayloom_engine.worker.slots import Slot
from rt_slots import make_slot

NEAR = 1e-5  # if the relative difference of two scores is smaller, either token may be chosen
_CPU = torch.device("cpu")


def random_logits(vocab_size: int, seed: int, spread: float) -> torch.Tensor:
    return torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def random_params(vocab_size: int) -> st.SearchStrategy[dict]:
    """Settings of a request. Each setting is often off."""
    token_ids = st.integers(0, vocab_size - 1)
    return st.fixed_dictionaries(
        {"seed": st.integers(0, 2**63 - 1), "temperature": st.sampled_from([0.0, 1e-5, 0.01, 0.5, 0.8, 1.0, 3.0])},
        optional={
            "top_k": st.sampled_from([1, 2, 40, 500, 2000, vocab_size - 1, vocab_size]).map(
                lambda k: min(k, vocab_size)
            ),
            "top_p": st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999]),
            "min_p": st.sampled_from([1e-9, 0.001, 0.05, 0.5, 1.0]),
            "repetition_penalty": st.sampled_from([0.5, 1.1, 3.0]),
            "presence_penalty": st.sampled_from([-2.0, 0.3]),
            "frequency_penalty": st.sampled_from([-0.7, 1.3]),
            "logit_bias": st.dictionaries(token_ids, st.floats(-100, 100), max_size=4).map(
                lambda biases: tuple(sorted(biases.items()))
            ),
            "min_tokens": st.just(4),
            "stop_token_ids": st.lists(token_ids, max_size=3).map(tuple),
            "bad_words": st.lists(token_ids, max_size=3).map(lambda ids: tuple((token_id,) for token_id in ids)),
            "allowed_token_ids": st.lists(token_ids, min_size=1, max_size=5).map(tuple),
        },
    )


def random_slot(vocab_size: int, rng: random.Random, params: dict) -> Slot:
    """A slot with a sequence in which many tokens repeat."""
    ids = [rng.randrange(vocab_size) for _ in range(6)]
    prompt = rng.choices(ids, k=rng.randrange(1, 40))
    return make_slot(prompt, rng.choices(ids, k=rng.randrange(8)), eos=(rng.choice(ids),), **params)


def random_mask(vocab_size: int, rng: random.Random, kind: str) -> Mask | None:
    """Tokens that a grammar allows: at least one. Bits beyond the vocabulary may be set, too."""
    if kind == "all":
        return None
    words = np.array([rng.getrandbits(32) for _ in range((vocab_size + 31) // 32)], dtype=np.uint32)
    if kind == "few":
        words[rng.randrange(len(words)) :] = 0
    words[rng.randrange(vocab_size) // 32] |= np.uint32(0xFFFFFFFF if kind == "most" else 1)
    return words.view(np.int32)


def assert_same_choice(found: int | None, expected: int | None, logits_V: torch.Tensor, slot: Slot) -> None:
    """Accepts equal ids, and different ids if the reference keeps both tokens with nearly equal scores. Else fails."""
    if found == expected:
        return
    assert found is not None and expected is not None
    params = slot.params
    adjusted_V = logits_V.clone()
    adjust_logits(adjusted_V, slot)
    assert not params.is_greedy, f"{found} instead of {expected}"
    scaled_V = adjusted_V / params.temperature
    kept = _kept_token_ids(scaled_V, params.top_k, params.top_p, params.min_p)
    assert kept is None or found in kept.tolist(), f"{found} is not kept"
    scores_V = scaled_V + GumbelNoise(len(logits_V), _CPU)(params.seed, slot.num_tokens)
    event("scores are nearly equal")
    assert scores_V[found].item() == pytest.approx(scores_V[expected].item(), rel=NEAR)


def kept_in_order(logits: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The kept ids in descending order of logits; ids with equal logits in ascending order."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = [i for i in order[: top_k or None] if not min_p or logits[i] >= logits[order[0]] + math.log(min_p)]
    masses = [math.exp(logits[i] - logits[order[0]]) for i in order]
    kept = [i for n, i in enumerate(order) if sum(masses[:n]) < top_p * sum(masses)]
    return kept if top_p < 1.0 else order
