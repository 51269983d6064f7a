"""CpuSampler: chooses the tokens of a step with one call of the C library, as worker/sampler.py defines the choice.

The library needs no sorted vocabulary and no exact noise for most tokens; docs/design/engine-worker.md says why. Token
ids equal the reference's, with two exceptions. If two scores are very close, the rounding of a logarithm decides. If
several tokens have equal logits at the border of top_k or top_p, torch keeps any of them, and the library keeps those
with the lowest ids.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.cpu_library.library import CpuLibrary
from rayloom_engine.cpu_library.sampling import SAMPLING, LogprobsStruct
from rayloom_engine.worker.bans import all_banned_ids
from rayloom_engine.worker.slots import Slot

FloatArray = npt.NDArray[np.float32]


class CpuSampler:
    """Chooses tokens from rows of logits over one vocabulary, in numpy arrays."""

    def __init__(self, library: CpuLibrary, vocab_size: int) -> None:
        self._library = library
        self._vocab_size = vocab_size

    def __call__(self, logits_NV: FloatArray, slots: list[Slot]) -> list[int | None]:
        """Returns one token id per row, None for a row that is not finite. `logits_NV` is float32."""
        logits_NV = self._checked(logits_NV, len(slots))
        sampling_N = np.zeros(len(slots), dtype=SAMPLING)
        arrays: list[npt.NDArray[np.generic]] = []  # keeps alive what `sampling_N` points to
        for row, slot in enumerate(slots):
            sampling_N[row] = _sampling(slot, self._vocab_size, arrays)
        ids = self._library.sample(logits_NV, sampling_N)
        return [None if token_id < 0 else token_id for token_id in ids]

    def describe(self, logits_NV: FloatArray, token_ids: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
        """Returns the log-probability of the given token of each row n, with `num_tops[n]` most likely alternatives.

        The entry of a row that is not finite has no meaning.
        """
        logits_NV = self._checked(logits_NV, len(token_ids))
        ids_N = np.array(token_ids, dtype=np.int64)
        num_tops_N = np.minimum(np.array(num_tops, dtype=np.int64), self._vocab_size)
        most = int(num_tops_N.max(initial=0))
        logprobs_N = np.zeros(len(token_ids), dtype=np.float32)
        ranks_N = np.zeros(len(token_ids), dtype=np.int64)
        top_ids = np.zeros((len(token_ids), most), dtype=np.int64)
        top_logprobs = np.zeros((len(token_ids), most), dtype=np.float32)
        out = LogprobsStruct(
            ids_N.ctypes.data,
            num_tops_N.ctypes.data,
            most,
            logprobs_N.ctypes.data,
            ranks_N.ctypes.data,
            top_ids.ctypes.data,
            top_logprobs.ctypes.data,
        )
        self._library.describe(logits_NV, out)
        tops = [list(zip(i, v, strict=True)) for i, v in zip(top_ids.tolist(), top_logprobs.tolist(), strict=True)]
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(top[:num]))
            for token_id, logprob, rank, top, num in zip(
                token_ids, logprobs_N.tolist(), ranks_N.tolist(), tops, num_tops, strict=True
            )
        ]

    def _checked(self, logits_NV: FloatArray, num_rows: int) -> FloatArray:
        """Returns the logits as the library reads them: row after row."""
        assert logits_NV.shape == (num_rows, self._vocab_size), f"{num_rows} rows, but logits {logits_NV.shape}"
        assert logits_NV.dtype == np.float32, logits_NV.dtype
        return np.ascontiguousarray(logits_NV)


def _sampling(slot: Slot, vocab_size: int, arrays: list[npt.NDArray[np.generic]]) -> tuple[int | float, ...]:
    """Returns an element of SAMPLING. Adds to `arrays` the arrays whose addresses the element holds."""
    params = slot.params

    def address(array: npt.NDArray[np.generic]) -> int:
        arrays.append(array)
        return array.ctypes.data

    token_ids, repetition_penalty = _penalised(slot)
    has_penalty = repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    banned_ids = bias_ids = biases = num_banned = 0
    banned = all_banned_ids(slot, vocab_size) if slot.allowed is None else None
    if banned is not None:
        banned_ids = address(banned)
        num_banned = len(banned)
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        bias_ids = address(np.array(ids, dtype=np.int64))
        biases = address(np.array(values, dtype=np.float32))
    return (
        params.seed,
        address(token_ids) if has_penalty else 0,
        slot.num_prompt_tokens,
        slot.num_tokens,
        0 if slot.allowed is None else address(slot.allowed),
        banned_ids,
        bias_ids,
        biases,
        num_banned,
        len(params.logit_bias),
        params.top_k,
        params.top_p,
        params.min_p,
        params.temperature,
        repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _penalised(slot: Slot) -> tuple[npt.NDArray[np.int64], float]:
    """Returns the token ids for penalties, and the repetition penalty.

    The library applies the repetition penalty to all these ids. So placeholders of embeddings are replaced by a
    generated id, to which the penalty applies anyway; without a generated id there is nothing to penalise.
    """
    if not slot.has_embeds or slot.params.repetition_penalty == 1.0:
        return slot.token_ids, slot.params.repetition_penalty
    if not slot.num_generated:
        return slot.token_ids, 1.0
    token_ids = slot.token_ids.copy()
    token_ids[: slot.num_unknown] = token_ids[slot.num_unknown]
    return token_ids, slot.params.repetition_penalty
