"""The write into the KV cache as one call of torch."""

from __future__ import annotations

import torch


def kv_write(pages: torch.Tensor, key_value_T2KD: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """Implements KvWrite."""
    slots = pages.view(pages.shape[0] * pages.shape[1], -1)
    slots.index_copy_(0, slot_mapping_T, key_value_T2KD.reshape(slot_mapping_T.shape[0], -1).to(pages.dtype))
