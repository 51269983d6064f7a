"""The KV cache: sizes, and blocks that are copied and cleared in every layer."""

from __future__ import annotations

import torch

from rayloom_engine.kernels.kv_write.plain import kv_write
from rayloom_engine.kv.cache import KvLayout, KvPages

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2)


def make_cache() -> KvPages:
    return KvPages.allocate(LAYOUT, num_blocks=3, block_size=2, dtype=torch.float32, device=torch.device("cpu"))


def test_a_new_cache_is_zero_and_has_the_size_of_its_layout() -> None:
    cache = make_cache()
    assert (cache.num_blocks, cache.block_size, cache.num_bytes) == (3, 2, 2 * 2 * 3 * 2 * 2 * 4)
    assert cache.num_bytes == 3 * LAYOUT.block_bytes(2, 4)
    assert all(not pages.any() for pages in cache.pages)


def test_blocks_are_copied_and_cleared_in_every_layer() -> None:
    cache = make_cache()
    for layer, pages in enumerate(cache.pages):
        key_values = torch.stack((torch.full((2, 1, 2), 1.0 + layer), torch.full((2, 1, 2), 5.0)), dim=1)
        kv_write(pages, key_values, torch.tensor([1, 2]))
    cache.copy_blocks(((0, 2),))
    cache.copy_blocks(())
    assert cache.pages[1][:, :, 0, 0, 0].tolist() == [[0, 2], [2, 0], [0, 2]]
    assert cache.pages[0][:, :, 1, 0, 1].tolist() == [[0, 5], [5, 0], [0, 5]]
    cache.clear_blocks((0, 1))
    assert cache.pages[1][:, :, 0, 0, 0].tolist() == [[0, 0], [0, 0], [0, 2]]
