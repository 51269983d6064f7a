"""Sampler: chooses the next token of each sequence from logits, seed, position and the sequence's own ids alone.

The order of operations is vLLM's: logprobs of the raw logits; mask of the form, bans (bans.py), logit_bias, penalties;
temperature; min_p, top_k, top_p; Gumbel-max. Each row is sampled alone, so its token does not depend on the rest of
the batch.

Legend: N rows, V vocabulary, G distinct generated ids.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.grammar.matcher import Mask
from rayloom_engine.worker.bans import all_banned_ids
from rayloom_engine.worker.noise import GumbelNoise
from rayloom_engine.worker.slots import Slot

_FEW = 512  # number of most likely tokens on which top_p and min_p are tried, before the whole vocabulary


class Sampler:
    """Chooses tokens from rows of logits over one vocabulary."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._noise = GumbelNoise(vocab_size, device)

    def __call__(self, logits_NV: torch.Tensor, slots: list[Slot]) -> list[int | None]:
        """Returns one token id per row, None for a row that is not finite. May overwrite `logits_NV` (float32)."""
        highest_N, greedy_N = logits_NV.max(dim=-1)
        is_finite_N = highest_N.isfinite().tolist()
        greedy_ids = greedy_N.tolist()
        token_ids: list[int | None] = []
        for row, slot in enumerate(slots):
            if not is_finite_N[row]:
                token_ids.append(None)
            elif is_plain_greedy(slot):
                token_ids.append(int(greedy_ids[row]))
            else:
                token_ids.append(self._sample(logits_NV[row], slot))
        return token_ids

    def describe(self, logits_NV: torch.Tensor, token_ids: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
        """Returns the result of the function `token_logprobs` for these arguments."""
        return token_logprobs(logits_NV, token_ids, num_tops)

    def _sample(self, logits_V: torch.Tensor, slot: Slot) -> int:
        adjust_logits(logits_V, slot)
        params = slot.params
        if params.is_greedy:
            return int(logits_V.argmax())
        logits_V = logits_V / params.temperature
        kept = _kept_token_ids(logits_V, params.top_k, params.top_p, params.min_p)
        # The noise depends on the position of the chosen token, so a replay from any position draws the same noise.
        noise = self._noise(params.seed, slot.num_tokens, kept)
        scores = (logits_V if kept is None else logits_V[kept]) + noise
        best = int(scores.argmax())
        return best if kept is None else int(kept[best])


def is_plain_greedy(slot: Slot) -> bool:
    """True if the next token is the one with the highest raw logit."""
    params = slot.params
    return (
        params.is_greedy
        and slot.allowed is None
        and not params.logit_bias
        and slot.num_generated >= params.min_tokens
        and not params.bad_words
        and params.allowed_token_ids is None
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
    )


def adjust_logits(logits_V: torch.Tensor, slot: Slot) -> None:
    """Applies the form's mask, bans, logit_bias and penalties, in place."""
    params = slot.params
    if slot.allowed is not None:
        _mask_logits(logits_V, slot.allowed)
    elif (banned := all_banned_ids(slot, logits_V.numel())) is not None:
        logits_V[torch.from_numpy(banned).to(logits_V.device)] = -torch.inf
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits_V.index_add_(
            0,
            torch.tensor(ids, device=logits_V.device),
            torch.tensor(biases, dtype=logits_V.dtype, device=logits_V.device),
        )
    if params.repetition_penalty != 1.0:
        # https://arxiv.org/abs/1909.05858 section 4.1. Negative logits are multiplied, so that they become smaller too.
        seen = torch.from_numpy(np.unique(slot.token_ids[slot.num_unknown : slot.num_tokens])).to(logits_V.device)
        logits = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
    if (params.presence_penalty or params.frequency_penalty) and slot.num_generated:
        generated = slot.token_ids[slot.num_prompt_tokens : slot.num_tokens]
        unique, counts = np.unique(generated, return_counts=True)
        ids_G, counts_G = (torch.from_numpy(values).to(logits_V.device) for values in (unique, counts))
        logits_V[ids_G] -= params.presence_penalty + params.frequency_penalty * counts_G


def _mask_logits(logits_V: torch.Tensor, allowed: Mask) -> None:
    """Sets the logits of tokens that are not allowed to -infinity."""
    words = torch.from_numpy(allowed).to(logits_V.device)  # the copy to a GPU has 1 bit per token
    bits = torch.arange(32, dtype=torch.int32, device=logits_V.device)
    is_allowed_V = ((words[:, None] >> bits) & 1).view(-1)[: logits_V.numel()].bool()
    logits_V.masked_fill_(~is_allowed_V, -torch.inf)


def _kept_token_ids(logits_V: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor | None:
    """Returns the ids of the tokens that may be chosen, or None for all. The most likely token is always kept.

    Every rule keeps the most likely tokens, so the _FEW most likely tokens nearly always suffice. Sorting a vocabulary
    of 49152 takes 6 ms on a slow core, longer than the rest of a small model's step.
    """
    vocab_size = logits_V.numel()
    has_k = 0 < top_k < vocab_size
    if not has_k and top_p >= 1.0 and min_p <= 0.0:
        return None
    if not has_k:
        ids = _kept_of(logits_V, min(_FEW, vocab_size), False, top_p, min_p)
        if ids is not None:
            return ids
    ids = _kept_of(logits_V, top_k if has_k else vocab_size, True, top_p, min_p)
    assert ids is not None
    return ids


def _kept_of(logits_V: torch.Tensor, num: int, is_whole: bool, top_p: float, min_p: float) -> torch.Tensor | None:
    """Returns which of the `num` most likely tokens are kept, or None if the rules might keep further tokens.

    `is_whole`: no further token can be kept, so probabilities are normalised over these `num` tokens.
    """
    logits, ids = logits_V.topk(num)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if min_p > 0.0:
        # This is p >= min_p * p_max, expressed in logits.
        keep &= logits >= logits[0] + math.log(min_p)
        is_whole = is_whole or not keep[-1]
        if not is_whole:
            return None
    if top_p < 1.0:
        among = logits.masked_fill(~keep, -torch.inf) if is_whole else logits_V
        probs = (logits.double() - among.double().logsumexp(dim=-1)).exp_().masked_fill_(~keep, 0.0)
        keep &= probs.cumsum(dim=-1) - probs < top_p
        is_whole = is_whole or not keep[-1]
    keep[0] = True
    return ids[keep] if is_whole else None


def are_finite(logits_NV: torch.Tensor) -> bool:
    """True if a token can be chosen from every row. A NaN anywhere in a row makes its maximum NaN."""
    return bool(logits_NV.amax(dim=-1).isfinite().all())


def token_logprobs(logits_NV: torch.Tensor, token_ids: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
    """Returns the log-probability of the given token of each row n, with `num_tops[n]` most likely alternatives."""
    ids_N1 = torch.tensor(token_ids, device=logits_NV.device)[:, None]
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    chosen = logprobs_NV.gather(1, ids_N1)[:, 0].tolist()
    # Tokens are ordered by logits, because different logits may round to the same log-probability.
    ranks = (logits_NV > logits_NV.gather(1, ids_N1)).sum(dim=-1).add_(1).tolist()
    most = max(num_tops, default=0)
    if most:
        ids = logits_NV.topk(min(most, logits_NV.shape[-1]), dim=-1).indices
        values = logprobs_NV.gather(1, ids)
        tops = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    else:
        tops = [[] for _ in token_ids]
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(top[:num]))
        for token_id, logprob, rank, top, num in zip(token_ids, chosen, ranks, tops, num_tops, strict=True)
    ]
