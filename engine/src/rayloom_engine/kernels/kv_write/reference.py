"""The write into the KV cache, one token at a time."""

from __future__ import annotations

import torch


def kv_write(pages: torch.Tensor, key_value_T2KD: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """Implements KvWrite."""
    block_size = pages.shape[1]
    for row, slot in enumerate(slot_mapping_T.tolist()):
        pages[slot // block_size, slot % block_size] = key_value_T2KD[row].reshape(pages.shape[2:]).to(pages.dtype)
