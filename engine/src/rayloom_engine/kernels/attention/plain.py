"""Attention by torch's scaled_dot_product_attention (SDPA), over blocks gathered into a buffer that all layers share.

Two measurements on CPU led to this form. `pages[block_table]` takes ten times as long as index_select into a buffer
that is kept. SDPA with `enable_gqa` and one query token is far slower than SDPA with the query heads of a key head as
rows of one matrix. The blocks to gather and the masks are the same for all layers, so the plan holds both.

Legend: T tokens of the step, H query heads, K key/value heads, G = H / K query heads for each of them, D head size,
R sequences of a decode bucket (a padded batch), L gathered positions, n tokens of one prefill chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rayloom_engine.kernels.attention import AttentionBatch

# One more bucket takes as much time as this many padded positions. On a CPU a bucket takes about 0.1 ms per layer, a
# padded position 0.25 us.
_BUCKET_COST_POSITIONS = 384
# A bucket gathers at most this many positions, so that they are still in the CPU's cache when attention reads them.
_BUCKET_MAX_POSITIONS = 4096

_SingleRow = tuple[int, int, int]  # a sequence with one new token: (context length, row in T, index of the sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """The blocks to gather, the buffer to which each layer copies them, and views of this buffer for SDPA."""

    block_ids: torch.Tensor  # int64 [blocks]
    blocks: torch.Tensor  # [blocks, block size, 2, K, D] in the compute type; every call overwrites it
    keys: torch.Tensor  # 4-dimensional view of `blocks` for SDPA; the last two dimensions are [L, D]
    values: torch.Tensor  # view of `blocks`, as `keys`

    def fill(self, pages: torch.Tensor) -> None:
        if pages.dtype == self.blocks.dtype:
            torch.index_select(pages, 0, self.block_ids, out=self.blocks)
        else:
            self.blocks.copy_(pages.index_select(0, self.block_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decode:
    """Sequences of similar length with one new token each, computed as one padded batch."""

    rows_R: torch.Tensor | slice  # the rows of these sequences in T
    gathered: _Gathered  # [R, K, L, D]
    mask_R11L: torch.Tensor | None  # added to the scores; None if every gathered position is visible


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefill:
    """A sequence with several new tokens."""

    rows_n: slice  # the chunk's rows in T
    gathered: _Gathered  # [K, G, L, D]; G has stride 0, so all query heads of a key head read the same memory
    mask_nL: torch.Tensor | None  # None if the chunk is the whole sequence, for which SDPA's causal mask suffices


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPlan:
    """Implements AttentionPlan. Every call of `attend` overwrites the plan's buffers."""

    decodes: tuple[_Decode, ...]
    prefills: tuple[_Prefill, ...]

    def attend(
        self,
        query_THD: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
        *,
        soft_cap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query_THD.shape
        num_kv_heads = pages.shape[3]
        grouped = (num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        query_TKGD = query_THD.view(grouped)
        out_TKGD = torch.empty(grouped, dtype=query_THD.dtype, device=query_THD.device)
        scores = _ScoreRule(
            scale=scale, soft_cap=soft_cap, sinks_KG=None if sinks_H is None else sinks_H.view(grouped[1:3])
        )
        for part in self.decodes:
            part.gathered.fill(pages)
            out_TKGD[part.rows_R] = scores.attend(
                query_TKGD[part.rows_R], part.gathered, part.mask_R11L, is_decode=True
            )
        for chunk in self.prefills:
            chunk.gathered.fill(pages)
            query_KGnD = query_TKGD[chunk.rows_n].permute(1, 2, 0, 3)
            out_KGnD = scores.attend(query_KGnD, chunk.gathered, chunk.mask_nL, is_decode=False)
            out_TKGD[chunk.rows_n] = out_KGnD.permute(2, 0, 1, 3)
        return out_TKGD.view(num_tokens, num_heads, head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoreRule:
    """The rule by which a layer computes scores from queries and keys."""

    scale: float
    soft_cap: float | None
    sinks_KG: torch.Tensor | None

    def attend(
        self, query: torch.Tensor, gathered: _Gathered, mask: torch.Tensor | None, *, is_decode: bool
    ) -> torch.Tensor:
        """Returns [R, K, G, D] for the queries of a decode bucket, or [K, G, n, D] for those of a chunk.

        `mask` is added to the scores. A chunk without a mask is a whole sequence, in which attention is causal.
        """
        if self.soft_cap is None and self.sinks_KG is None:
            return F.scaled_dot_product_attention(
                query,
                gathered.keys,
                gathered.values,
                attn_mask=mask,
                is_causal=mask is None and not is_decode,
                scale=self.scale,
            )
        scores = torch.matmul(query, gathered.keys.transpose(-1, -2)).float() * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if mask is not None:
            scores = scores + mask
        elif not is_decode:
            length = scores.shape[-1]
            hidden_nL = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden_nL, float("-inf"))
        if self.sinks_KG is not None:
            sinks = self.sinks_KG.float()
            sinks = sinks[None, :, :, None] if is_decode else sinks[:, :, None, None]
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : gathered.keys.shape[-2]]
        return torch.matmul(weights.to(query.dtype), gathered.values)


def plan_attention(
    batch: AttentionBatch,
    *,
    num_heads: int,
    pages: torch.Tensor,
    window: int | None,
    compute_dtype: torch.dtype,
) -> PlainPlan:
    """Implements PlanAttention."""
    prefills: list[tuple[int, int]] = []  # (row in T, index of the sequence)
    single_rows: list[_SingleRow] = []
    row = 0
    for index, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        if query_len == 1:
            single_rows.append((context_len, row, index))
        else:
            prefills.append((row, index))
        row += query_len
    form = _Form(pages=pages, num_heads=num_heads, window=window, dtype=compute_dtype)
    return PlainPlan(
        decodes=tuple(_decode(batch, bucket, form) for bucket in _buckets(single_rows, window)),
        prefills=tuple(_prefill(batch, index, row, form) for row, index in prefills),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The values that all sequences of a plan share."""

    pages: torch.Tensor
    num_heads: int
    window: int | None
    dtype: torch.dtype  # type of the gathered blocks and the masks

    @property
    def block_size(self) -> int:
        return self.pages.shape[1]

    def first_block(self, context_len: int, query_len: int) -> int:
        """Returns the first block that any new token of a sequence sees."""
        return 0 if self.window is None else max(0, context_len - query_len + 1 - self.window) // self.block_size

    def new_blocks(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Returns a buffer for copies of these blocks."""
        return self.pages.new_empty((block_ids.shape[0], *self.pages.shape[1:]), dtype=self.dtype)


def _buckets(single_rows: list[_SingleRow], window: int | None) -> list[list[_SingleRow]]:
    """Groups rows of similar context length. Opens a new group only where padding would cost more than a new group."""

    def visible(context_len: int) -> int:
        return context_len if window is None else min(context_len, window)

    total = sum(visible(context_len) for context_len, _, _ in single_rows)
    longest = max((visible(context_len) for context_len, _, _ in single_rows), default=0)
    padded = longest * len(single_rows)
    if padded - total <= _BUCKET_COST_POSITIONS:
        # All lengths are similar, so keep the order of T: then each bucket is a slice of T.
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


def _decode(batch: AttentionBatch, bucket: list[_SingleRow], form: _Form) -> _Decode:
    """Prepares a bucket. Each row gathers L positions: some before the window, then the visible ones, then padding."""
    block_size = form.block_size
    window = form.window
    device = form.pages.device
    first_blocks = [form.first_block(context_len, 1) for context_len, _, _ in bucket]
    num_blocks = max(
        -(-context_len // block_size) - first for (context_len, _, _), first in zip(bucket, first_blocks, strict=True)
    )
    tables_SB = batch.block_tables_SB
    sequences_R = torch.tensor([index for _, _, index in bucket], device=device)
    firsts_R = torch.tensor(first_blocks, device=device)
    lens_R = torch.tensor([context_len for context_len, _, _ in bucket], device=device)
    # Columns beyond a row's context are padding. The mask cannot hide a NaN in a padding block. So a row does not read
    # a block of another sequence there, but repeats its own last block.
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
        mask = _additive(hidden_RL, form.dtype)[:, None, None, :]

    rows = [row for _, row, _ in bucket]
    is_slice = rows == list(range(rows[0], rows[0] + len(rows)))
    return _Decode(
        rows_R=slice(rows[0], rows[0] + len(rows)) if is_slice else torch.tensor(rows, device=device),
        gathered=_decode_buffers(block_ids, len(rows), form),
        mask_R11L=mask,
    )


def _prefill(batch: AttentionBatch, index: int, row: int, form: _Form) -> _Prefill:
    """Prepares the chunk of sequence `index`, whose first new token is in row `row` of T."""
    block_size = form.block_size
    window = form.window
    device = form.pages.device
    query_len = batch.query_lens[index]
    context_len = batch.context_lens[index]
    first_block = form.first_block(context_len, query_len)
    first_position = first_block * block_size
    mask = None
    if query_len != context_len or (window is not None and context_len > window):
        query_positions = torch.arange(context_len - query_len, context_len, device=device)[:, None]
        key_positions = torch.arange(first_position, context_len, device=device)
        hidden_nL = key_positions > query_positions
        if window is not None:
            hidden_nL |= key_positions <= query_positions - window
        mask = _additive(hidden_nL, form.dtype)
    block_ids = batch.block_tables_SB[index, first_block : -(-context_len // block_size)]
    return _Prefill(
        rows_n=slice(row, row + query_len),
        gathered=_prefill_buffers(block_ids, context_len - first_position, form),
        mask_nL=mask,
    )


def _decode_buffers(block_ids: torch.Tensor, num_rows: int, form: _Form) -> _Gathered:
    _, _, _, num_kv_heads, head_dim = form.pages.shape
    blocks = form.new_blocks(block_ids)
    rows_RL2KD = blocks.view(num_rows, -1, 2, num_kv_heads, head_dim)
    key_RKLD, value_RKLD = (rows_RL2KD[:, :, part].transpose(1, 2) for part in (0, 1))
    return _Gathered(block_ids=block_ids, blocks=blocks, keys=key_RKLD, values=value_RKLD)


def _prefill_buffers(block_ids: torch.Tensor, num_positions: int, form: _Form) -> _Gathered:
    """Returns the buffers of a chunk.

    `num_positions` excludes the part of the last block that is beyond the context.
    """
    _, _, _, num_kv_heads, head_dim = form.pages.shape
    shown = (num_kv_heads, form.num_heads // num_kv_heads, num_positions, head_dim)
    blocks = form.new_blocks(block_ids)
    rows_L2KD = blocks.view(-1, 2, num_kv_heads, head_dim)[:num_positions]
    key_KGLD, value_KGLD = (rows_L2KD[:, part].transpose(0, 1).unsqueeze(1).expand(shown) for part in (0, 1))
    return _Gathered(block_ids=block_ids, blocks=blocks, keys=key_KGLD, values=value_KGLD)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a mask that SDPA adds to the scores: -inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
