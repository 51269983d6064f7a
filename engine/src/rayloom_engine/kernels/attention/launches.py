"""Cuts the attention of a step into launches, tiles and splits, by bounds that the host knows. Pure.

Legend: T tokens of the step, S sequences, N slots, B blocks of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

LaunchKind = Literal["chunk", "decode"]
LAUNCH_KINDS: tuple[LaunchKind, ...] = get_args(LaunchKind)
# Programs for each multiprocessor: enough to hide the latency of memory, few enough that the shared memory suffices.
_PROGRAMS_PER_SM = 2
# A split reads at least this many positions, because combining smaller splits costs as much as the splits save.
_MIN_POSITIONS = 256
_MAX_SPLITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """A step's batch as tensors on the device, with the bounds that the host knows.

    All tensors are int32 and aligned to 16 bytes. A sequence may be empty, so that a batch can be filled up to the size
    of a CUDA graph.
    """

    tables_NB: torch.Tensor  # block tables by slot; entries beyond a sequence's context may have any value
    slots_S: torch.Tensor
    starts_S1: torch.Tensor  # [S + 1]: the first token of each sequence in T, then the number of all tokens
    context_lens_S: torch.Tensor  # tokens in the cache after this step
    num_seqs: int
    num_singles: int  # this many sequences at the front have at most one token each
    num_chunk_tokens: int  # upper bound of the tokens of all other sequences together
    max_context_len: int  # upper bound of the context lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    kind: LaunchKind
    first_seq: int
    num_seqs: int
    num_tokens: int  # upper bound of the tokens of all sequences of the launch
    num_tiles: int  # for each key/value head
    tiles_per_seq: int  # only for decodes: in a chunk launch, the number of tiles depends on the sequence's tokens
    num_splits: int


def plan_launches(
    batch: DeviceBatch,
    *,
    group: int,
    num_kv_heads: int,
    rows: Mapping[LaunchKind, int],
    num_positions: int,
    num_sms: int,
) -> tuple[Launch, ...]:
    """Returns the launches of a step, at most one of each kind.

    `group`: query heads of a key/value head. `rows`: rows of a tile. `num_positions`: most positions that a row sees.
    """
    launches: list[Launch] = []
    if batch.num_singles:
        tiles_per_seq = -(-group // rows["decode"])
        num_tiles = batch.num_singles * tiles_per_seq
        launches.append(
            Launch(
                kind="decode",
                first_seq=0,
                num_seqs=batch.num_singles,
                num_tokens=batch.num_singles,
                num_tiles=num_tiles,
                tiles_per_seq=tiles_per_seq,
                num_splits=num_splits(
                    num_programs=num_tiles * num_kv_heads, num_positions=num_positions, num_sms=num_sms
                ),
            )
        )
    num_chunks = batch.num_seqs - batch.num_singles
    if num_chunks:
        num_tiles = batch.num_chunk_tokens * group // rows["chunk"] + num_chunks
        launches.append(
            Launch(
                kind="chunk",
                first_seq=batch.num_singles,
                num_seqs=num_chunks,
                num_tokens=batch.num_chunk_tokens,
                num_tiles=num_tiles,
                tiles_per_seq=1,
                num_splits=num_splits(
                    num_programs=num_tiles * num_kv_heads, num_positions=num_positions, num_sms=num_sms
                ),
            )
        )
    return tuple(launches)


def num_splits(*, num_programs: int, num_positions: int, num_sms: int) -> int:
    """Returns the number of splits by which a launch fills the GPU, at least 1.

    `num_programs`: programs of the launch if there is one split. `num_positions`: upper bound of the positions that a
    row sees. A sequence with a shorter context leaves its last splits empty.
    """
    wanted = -(-_PROGRAMS_PER_SM * num_sms // max(1, num_programs))
    return max(1, min(wanted, num_positions // _MIN_POSITIONS, _MAX_SPLITS))
