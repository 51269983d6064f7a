"""GpuSampler: chooses the tokens of a step on a GPU, as worker/sampler.py defines the choice.

The host reads from the GPU once, at the end. Token ids equal the reference's, with two exceptions, which the C library
has as well. Rounding decides if two scores, or top_p and a sum of probabilities, are equal up to the last bits. If
several tokens have logits that equal the threshold of top_k or top_p, those with the lowest ids are kept.

Legend: N rows of logits, M of them that are not plain greedy, V vocabulary, W words of a mask, E entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, TokenLogprobs
from rayloom_engine.grammar.matcher import Mask
from rayloom_engine.kernels.sampling import NUM_FLOATS, NUM_INTS, Rows
from rayloom_engine.kernels.sampling.triton_gpu import BLOCKS, Blocks, add_at, choose, logprobs
from rayloom_engine.worker.bans import all_banned_ids
from rayloom_engine.worker.noise import noise_key
from rayloom_engine.worker.sampler import is_plain_greedy
from rayloom_engine.worker.slots import Slot
from rayloom_engine.worker.token_counts import TokenCounts

_MASK_SHARE = 64  # a slot that bans more than 1 / 64 of the vocabulary gets a mask; fewer tokens are banned one by one


class GpuSampler:
    """Chooses tokens from rows of logits over one vocabulary, in memory of the GPU."""

    def __init__(self, vocab_size: int, device: torch.device, blocks: Blocks = BLOCKS) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._blocks = blocks
        self._counts = TokenCounts(vocab_size, device)

    def warm_up(self) -> None:
        """Runs all kernels once, so that Triton compiles none of them while requests wait."""
        params = DecodingParams(
            max_tokens=1, top_k=1, top_p=0.5, min_p=0.5, frequency_penalty=0.5, logit_bias=((0, 1.0),), logprobs=1
        )
        new = NewSlot(
            slot=0,
            request_id="warm-up",
            token_ids=(0,),
            num_prompt_tokens=1,
            block_table=(0,),
            params=params,
            eos_token_ids=(),
        )
        logits_NV = torch.zeros(1, self._vocab_size, dtype=torch.float32, device=self._device)
        self(logits_NV, [Slot(new)])
        self.describe(logits_NV, [0], [1])

    def __call__(self, logits_NV: torch.Tensor, slots: list[Slot]) -> list[int | None]:
        """Returns one token id per row, None for a row that is not finite. May overwrite `logits_NV` (float32)."""
        ids = self.choose(logits_NV, slots).tolist()
        return [None if token_id < 0 else token_id for token_id in ids]

    def choose(self, logits_NV: torch.Tensor, slots: list[Slot]) -> torch.Tensor:
        """Returns token ids, int64 [N], on the device; -1 for rows that are not finite. Does not wait for the ids."""
        assert logits_NV.shape == (len(slots), self._vocab_size), f"{len(slots)} rows, but logits {logits_NV.shape}"
        return choose(logits_NV.contiguous(), self._rows(slots), self._blocks)

    def describe(self, logits_NV: torch.Tensor, token_ids: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
        """Returns the log-probability of the given token of each row n, with `num_tops[n]` most likely alternatives."""
        num_rows = len(token_ids)
        ids_N = torch.tensor(token_ids, dtype=torch.int64).to(self._device)
        logits_NV = logits_NV.contiguous()
        log_sums_N, logprobs_N, ranks_N = logprobs(logits_NV, ids_N, self._blocks)
        most = min(max(num_tops, default=0), self._vocab_size)
        # On a GPU, torch's topk is a radix selection, which does not sort the whole row.
        top_values, top_ids = logits_NV.topk(most, dim=-1) if most else (logits_NV[:, :0], ids_N[:, None][:, :0])
        parts = (logprobs_N[:, None], ranks_N[:, None], top_values - log_sums_N[:, None], top_ids)
        # All numbers are exact in float64, so one read suffices.
        values = torch.cat([part.double() for part in parts], dim=1).tolist()
        entries = []
        for row in range(num_rows):
            logprob, rank, *tops = values[row]
            pairs = zip(map(int, tops[most:]), tops[:most], strict=True)
            entries.append(TokenLogprobs(token_ids[row], logprob, int(rank), tuple(pairs)[: num_tops[row]]))
        return entries

    def _rows(self, slots: list[Slot]) -> Rows | None:
        """Returns the inputs of the kernels; None if every row is greedy, without bans, biases and penalties."""
        rows = [row for row, slot in enumerate(slots) if not is_plain_greedy(slot)]
        if not rows:
            return None
        chosen = [slots[row] for row in rows]
        ints = np.zeros((len(rows), NUM_INTS), dtype=np.int64)
        floats = np.zeros((len(rows), NUM_FLOATS), dtype=np.float64)
        numbers_N = np.full(len(slots), -1, dtype=np.int64)
        numbers_N[rows] = np.arange(len(rows))
        counted = [slot for slot in chosen if _has_penalty(slot)]
        entries = _Entries(self._vocab_size)
        for number, (row, slot) in enumerate(zip(rows, chosen, strict=True)):
            mask_row = entries.add(row, slot)
            count_row = self._counts.row_of(slot) if _has_penalty(slot) else -1
            ints[number], floats[number] = _settings(row, slot, mask_row, count_row)
        count_places, count_addends = self._counts.additions(counted)
        parts = _to_device(
            [ints, floats, numbers_N, entries.places, entries.addends, count_places, count_addends], self._device
        )
        if counted:
            add_at(self._counts.table_RV, parts[5], parts[6])
        return Rows(
            ints=parts[0].view(len(rows), NUM_INTS),
            floats=parts[1].view(torch.float64).view(len(rows), NUM_FLOATS),
            numbers_N=parts[2],
            places_E=parts[3],
            addends_E=parts[4].view(torch.float64),
            masks=entries.masks(self._device),
            counts=self._counts.table_RV if counted else None,
            has_thresholds=any(_has_thresholds(slot, self._vocab_size) for slot in chosen),
        )


class _Entries:
    """The bans and biases of a step: as single elements, or as masks."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: list[npt.NDArray[np.int64]] = []
        self._addends: list[npt.NDArray[np.float64]] = []
        self._masks: list[Mask] = []

    def add(self, row: int, slot: Slot) -> int:
        """Adds the bans and biases of a slot. Returns the row of its mask, -1 if it has none."""
        mask = slot.allowed
        banned = all_banned_ids(slot, self._vocab_size) if mask is None else None
        if banned is not None and len(banned) * _MASK_SHARE > self._vocab_size:
            mask = _mask_without(banned, self._vocab_size)
            banned = None
        biases = dict(slot.params.logit_bias)
        if banned is not None:
            # An element of the logits has at most one entry, so the entry of a ban replaces the entry of a bias.
            biases |= dict.fromkeys(banned.tolist(), -math.inf)
        if biases:
            ids = np.fromiter(biases.keys(), dtype=np.int64, count=len(biases))
            self._places.append(row * self._vocab_size + ids)
            self._addends.append(np.fromiter(biases.values(), dtype=np.float64, count=len(biases)))
        if mask is None:
            return -1
        self._masks.append(mask)
        return len(self._masks) - 1

    @property
    def places(self) -> npt.NDArray[np.int64]:
        return np.concatenate(self._places) if self._places else np.zeros(0, dtype=np.int64)

    @property
    def addends(self) -> npt.NDArray[np.float64]:
        return np.concatenate(self._addends) if self._addends else np.zeros(0, dtype=np.float64)

    def masks(self, device: torch.device) -> torch.Tensor | None:
        # The mask of a form is longer if the tokenizer has more tokens than the model.
        num_words = -(-self._vocab_size // 32)
        return (
            torch.from_numpy(np.stack([mask[:num_words] for mask in self._masks])).to(device) if self._masks else None
        )


def _settings(row: int, slot: Slot, mask_row: int, count_row: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Returns the values of one row of Rows.ints and of Rows.floats."""
    params = slot.params
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if params.is_greedy:
        return (row, 0, mask_row, count_row, 1, 0), (1.0, 1.0, -math.inf, *penalties)
    key = noise_key(params.seed, slot.num_tokens)
    signed_key = key - (1 << 64) if key >= 1 << 63 else key
    log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    ints = (row, signed_key, mask_row, count_row, 0, params.top_k)
    return ints, (params.temperature, params.top_p, log_min_p, *penalties)


def _has_penalty(slot: Slot) -> bool:
    params = slot.params
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)


def _has_thresholds(slot: Slot, vocab_size: int) -> bool:
    params = slot.params
    has_any = 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
    return has_any and not params.is_greedy


def _mask_without(banned: npt.NDArray[np.int64], vocab_size: int) -> Mask:
    """Returns a mask that allows all tokens except the banned tokens."""
    allowed = np.ones(-(-vocab_size // 32) * 32, dtype=np.uint8)
    allowed[banned] = 0
    mask: Mask = np.packbits(allowed, bitorder="little").view(np.int32)
    return mask


def _to_device(
    arrays: Sequence[npt.NDArray[np.int64] | npt.NDArray[np.float64]], device: torch.device
) -> list[torch.Tensor]:
    """Returns the arrays as int64 tensors [elements], after one copy to the device. Each is aligned to 16 bytes."""
    sizes = [array.size + array.size % 2 for array in arrays]
    buffer = np.zeros(sum(sizes), dtype=np.int64)
    offsets = np.cumsum([0, *sizes])
    for array, offset in zip(arrays, offsets, strict=False):
        buffer[offset : offset + array.size] = array.reshape(-1).view(np.int64)
    whole = torch.from_numpy(buffer).to(device)
    return [whole[offset : offset + array.size] for array, offset in zip(arrays, offsets, strict=False)]
