"""Writes the keys and values of a step's tokens into one layer's pages.

    pages[slot[t] // P, slot[t] % P] = key_value[t]

Legend: T tokens of the step, N blocks in the cache, P positions in a block, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rayloom_engine.kernels.target import Target


class KvWrite(Protocol):
    def __call__(self, pages: torch.Tensor, key_value_T2KD: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
        """Rounds the T keys and values to the type of the pages, [N, P, 2, K, D], and writes them to their slots.

        A token's K keys precede its K values, so key_value may also be [T, 2 * K, D]; it may be strided over T.
        slot_mapping_T is int64: block id * P + offset.
        """


def choose_kv_write(target: Target) -> KvWrite:
    if target.backend == "reference":
        from rayloom_engine.kernels.kv_write import reference

        return reference.kv_write
    from rayloom_engine.kernels.kv_write import plain

    return plain.kv_write
