"""Causal attention over the paged KV cache, for sequences with one new token and with many in the same call.

    out[t] = softmax(scale * q[t] . K[visible]) V[visible]

where token t at position p sees positions (p - window, p], or [0, p] without a window.

The body gathers whole blocks into a buffer that is small and shared by all layers, and hands it to torch's
scaled_dot_product_attention. Two traps decide its form (measured on CPU): indexing `pages[block_table]` is ten times
slower than index_select into a kept buffer, and `enable_gqa` with one query token is far slower than packing the
query heads that share a key head as rows. What is the same for all layers (which blocks, which mask) is worked out
once a step, in a plan.

Legend: T tokens of the step, H query heads, K key/value heads, G = H / K query heads for each of them, D head size,
R sequences of a decode bucket, L gathered positions, n tokens of one prefill chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rayloom_engine.kernels.kv_cache import AttentionBatch

# One bucket more costs as much as this many padded positions (CPU: about 0.1 ms a layer against 0.25 us).
_BUCKET_COST_POSITIONS = 384
# The gathered positions of a bucket stay below this, so that they are still in the CPU's cache when they are used.
_BUCKET_MAX_POSITIONS = 4096


_SingleRow = tuple[int, int, int]  # (context length, row in T, index of the sequence) of one with one new token


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """Some blocks of the pages, and the buffers that they are copied to in every layer, as storage and as operands."""

    block_ids: torch.Tensor  # int64 [blocks]
    blocks: torch.Tensor  # [blocks, block size, 2, K, D] in the compute type, overwritten by every call
    keys: torch.Tensor  # the same memory as the attention call wants it: 4 dimensions, the last two are [L, D]
    values: torch.Tensor

    def fill(self, pages: torch.Tensor) -> None:
        if pages.dtype == self.blocks.dtype:
            torch.index_select(pages, 0, self.block_ids, out=self.blocks)
        else:
            self.blocks.copy_(pages.index_select(0, self.block_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decode:
    """Sequences with one new token each and similar lengths: one padded batch."""

    rows_R: torch.Tensor | slice  # their rows in T
    gathered: _Gathered  # [R, K, L, D]
    mask_R11L: torch.Tensor | None  # added to the scores; None when nothing is to be hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefill:
    """One sequence with several new tokens."""

    rows_n: slice  # its rows in T
    gathered: _Gathered  # [K, G, L, D], G with stride 0: every key head is shown to its query heads without a copy
    mask_nL: torch.Tensor | None  # None: the chunk is the whole sequence, and causality hides enough


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """One step's work for all layers that have the same window."""

    batch: AttentionBatch
    window: int | None
    decodes: tuple[_Decode, ...]
    prefills: tuple[_Prefill, ...]


def plan_attention(
    batch: AttentionBatch,
    *,
    num_heads: int,
    pages: torch.Tensor,
    window: int | None,
    compute_dtype: torch.dtype | None = None,
) -> AttentionPlan:
    """The plan of a step. `pages` is any layer's: it gives the sizes and the device.

    `compute_dtype` is that of the queries where the pages have another; they are widened as they are gathered.
    """
    dtype = compute_dtype or pages.dtype
    prefills: list[tuple[int, int]] = []  # (row in T, index of the sequence)
    single_rows: list[_SingleRow] = []
    row = 0
    for index, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        if query_len == 1:
            single_rows.append((context_len, row, index))
        else:
            prefills.append((row, index))
        row += query_len
    return AttentionPlan(
        batch=batch,
        window=window,
        decodes=tuple(_decode(batch, bucket, pages, window, dtype) for bucket in _buckets(single_rows, window)),
        prefills=tuple(_prefill(batch, index, row, num_heads, pages, window, dtype) for row, index in prefills),
    )


def paged_attention(query_THD: torch.Tensor, pages: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """Attention of the step's tokens, [T, H, D], contiguous. Their own keys and values must already be in the pages.

    query_THD may be strided over T; pages are one layer's, [blocks, block size, 2, K, D]. Mutates the plan's buffers.
    """
    num_tokens, num_heads, head_dim = query_THD.shape
    num_kv_heads = pages.shape[3]
    grouped = (num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    query_TKGD = query_THD.view(grouped)
    out_TKGD = torch.empty(grouped, dtype=query_THD.dtype, device=query_THD.device)
    for part in plan.decodes:
        part.gathered.fill(pages)
        out_TKGD[part.rows_R] = F.scaled_dot_product_attention(
            query_TKGD[part.rows_R],
            part.gathered.keys,
            part.gathered.values,
            attn_mask=part.mask_R11L,
            scale=scale,
        )
    for chunk in plan.prefills:
        chunk.gathered.fill(pages)
        out_KGnD = F.scaled_dot_product_attention(
            query_TKGD[chunk.rows_n].permute(1, 2, 0, 3),
            chunk.gathered.keys,
            chunk.gathered.values,
            attn_mask=chunk.mask_nL,
            is_causal=chunk.mask_nL is None,
            scale=scale,
        )
        out_TKGD[chunk.rows_n] = out_KGnD.permute(2, 0, 1, 3)
    return out_TKGD.view(num_tokens, num_heads, head_dim)


def _buckets(single_rows: list[_SingleRow], window: int | None) -> list[list[_SingleRow]]:
    """Groups of rows of similar length, so that padding costs less than more calls would."""

    def visible(context_len: int) -> int:
        return context_len if window is None else min(context_len, window)

    total = sum(visible(context_len) for context_len, _, _ in single_rows)
    longest = max((visible(context_len) for context_len, _, _ in single_rows), default=0)
    padded = longest * len(single_rows)
    if padded - total <= _BUCKET_COST_POSITIONS:
        # All similar: they stay in the order of T, so that each bucket is a slice of it.
        rows_per_bucket = max(1, _BUCKET_MAX_POSITIONS // max(1, longest))
        return [single_rows[start : start + rows_per_bucket] for start in range(0, len(single_rows), rows_per_bucket)]

    buckets: list[list[_SingleRow]] = []
    waste = 0
    for entry in sorted(single_rows, reverse=True):
        if buckets:
            bucket_len = visible(buckets[-1][0][0])
            waste += bucket_len - visible(entry[0])
            if waste <= _BUCKET_COST_POSITIONS and bucket_len * (len(buckets[-1]) + 1) <= _BUCKET_MAX_POSITIONS:
                buckets[-1].append(entry)
                continue
        buckets.append([entry])
        waste = 0
    return buckets


def _decode(
    batch: AttentionBatch, bucket: list[_SingleRow], pages: torch.Tensor, window: int | None, dtype: torch.dtype
) -> _Decode:
    """A row of L gathered positions is: some left of the window, the ones that are seen, padding."""
    block_size = pages.shape[1]
    device = pages.device
    first_blocks = [_first_block(context_len, 1, block_size, window) for context_len, _, _ in bucket]
    num_blocks = max(
        -(-context_len // block_size) - first for (context_len, _, _), first in zip(bucket, first_blocks, strict=True)
    )
    tables_SB = batch.block_tables_SB
    sequences_R = torch.tensor([index for _, _, index in bucket], device=device)
    firsts_R = torch.tensor(first_blocks, device=device)
    lens_R = torch.tensor([context_len for context_len, _, _ in bucket], device=device)
    # Columns past the context are padding, which the mask hides unless it is NaN: a row repeats its own last block.
    lasts_R = (lens_R - 1) // block_size
    columns = torch.minimum(firsts_R[:, None] + torch.arange(num_blocks, device=device), lasts_R[:, None])
    block_ids = tables_SB[sequences_R[:, None], columns].flatten()

    mask = None
    num_positions = num_blocks * block_size
    is_full = all(
        context_len - first * block_size == num_positions
        for (context_len, _, _), first in zip(bucket, first_blocks, strict=True)
    )
    if not is_full or (window is not None and num_positions > window):
        positions_RL = firsts_R[:, None] * block_size + torch.arange(num_positions, device=device)
        hidden_RL = positions_RL >= lens_R[:, None]
        if window is not None:
            hidden_RL |= positions_RL < lens_R[:, None] - window
        mask = _additive(hidden_RL, dtype)[:, None, None, :]

    rows = [row for _, row, _ in bucket]
    is_slice = rows == list(range(rows[0], rows[0] + len(rows)))
    return _Decode(
        rows_R=slice(rows[0], rows[0] + len(rows)) if is_slice else torch.tensor(rows, device=device),
        gathered=_decode_buffers(block_ids, len(rows), pages, dtype),
        mask_R11L=mask,
    )


def _prefill(
    batch: AttentionBatch,
    index: int,
    row: int,
    num_heads: int,
    pages: torch.Tensor,
    window: int | None,
    dtype: torch.dtype,
) -> _Prefill:
    block_size = pages.shape[1]
    query_len, context_len = batch.query_lens[index], batch.context_lens[index]
    first_block = _first_block(context_len, query_len, block_size, window)
    first_position = first_block * block_size
    mask = None
    if query_len != context_len or (window is not None and context_len > window):
        query_positions = torch.arange(context_len - query_len, context_len, device=pages.device)[:, None]
        key_positions = torch.arange(first_position, context_len, device=pages.device)
        hidden_nL = key_positions > query_positions
        if window is not None:
            hidden_nL |= key_positions <= query_positions - window
        mask = _additive(hidden_nL, dtype)
    block_ids = batch.block_tables_SB[index, first_block : -(-context_len // block_size)]
    return _Prefill(
        rows_n=slice(row, row + query_len),
        gathered=_prefill_buffers(block_ids, context_len - first_position, num_heads, pages, dtype),
        mask_nL=mask,
    )


def _decode_buffers(block_ids: torch.Tensor, num_rows: int, pages: torch.Tensor, dtype: torch.dtype) -> _Gathered:
    _, _, _, num_kv_heads, head_dim = pages.shape
    blocks = pages.new_empty((block_ids.shape[0], *pages.shape[1:]), dtype=dtype)
    rows_RL2KD = blocks.view(num_rows, -1, 2, num_kv_heads, head_dim)
    key_RKLD, value_RKLD = (rows_RL2KD[:, :, part].transpose(1, 2) for part in (0, 1))
    return _Gathered(block_ids=block_ids, blocks=blocks, keys=key_RKLD, values=value_RKLD)


def _prefill_buffers(
    block_ids: torch.Tensor, num_positions: int, num_heads: int, pages: torch.Tensor, dtype: torch.dtype
) -> _Gathered:
    """`num_positions` cuts off what lies in the last block beyond the context."""
    _, _, _, num_kv_heads, head_dim = pages.shape
    shown = (num_kv_heads, num_heads // num_kv_heads, num_positions, head_dim)
    blocks = pages.new_empty((block_ids.shape[0], *pages.shape[1:]), dtype=dtype)
    rows_L2KD = blocks.view(-1, 2, num_kv_heads, head_dim)[:num_positions]
    key_KGLD, value_KGLD = (rows_L2KD[:, part].transpose(0, 1).unsqueeze(1).expand(shown) for part in (0, 1))
    return _Gathered(block_ids=block_ids, blocks=blocks, keys=key_KGLD, values=value_KGLD)


def _first_block(context_len: int, query_len: int, block_size: int, window: int | None) -> int:
    """The first block that any of the sequence's new tokens sees."""
    return 0 if window is None else max(0, context_len - query_len + 1 - window) // block_size


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
