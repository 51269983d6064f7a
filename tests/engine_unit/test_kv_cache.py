"""The KV cache: its sizes, and copies and clears of blocks in every layer."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rayloom_engine.kernels.kv_write.plain import kv_write
from rayloom_engine.kv import host_blocks
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.host_blocks import HostBlocks
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.kv.library_host import LibraryHostBlocks
from rayloom_engine.kv.library_pages import LibraryPages

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


def test_blocks_come_back_from_host_memory_bit_by_bit_in_every_layer() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=4, layer_sizes=((3, 4), (1, 2)))
    cache = KvPages.allocate(layout, num_blocks=5, block_size=2, dtype=torch.bfloat16, device=torch.device("cpu"))
    for layer, pages in enumerate(cache.pages):
        # Every bit pattern of a bfloat16 is a number, a NaN or an infinity, and all of them must come back.
        pages.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=torch.Generator().manual_seed(layer))
    before = [pages.view(torch.int16).clone() for pages in cache.pages]
    memory = memoryview(bytearray(3 * layout.block_bytes(2, 2)))
    host = HostBlocks(memory, cache, 3)
    host.store(((4, 0), (1, 2)))
    cache.clear_blocks((0, 1, 2, 3, 4))
    host.load(((2, 3), (0, 0)))
    for pages, old in zip(cache.pages, before, strict=True):
        assert torch.equal(pages.view(torch.int16)[[0, 3]], old[[4, 1]])
        assert not pages[[1, 2, 4]].any()
    # Another process with the same memory loads the same.
    HostBlocks(memory, cache, 3).load(((0, 1),))
    assert torch.equal(cache.pages[1].view(torch.int16)[1], before[1][4])


def test_a_block_may_be_stored_and_loaded_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    for pages in cache.pages:
        pages.copy_(torch.arange(24.0).view(pages.shape))
    block_bytes = LAYOUT.block_bytes(2, 4)
    monkeypatch.setattr(host_blocks, "_BUFFER_BYTES", 2 * block_bytes)
    host = HostBlocks(memoryview(bytearray(3 * block_bytes)), cache, 3)
    assert [len(some) for some in host._rounds(((0, 2), (1, 1), (2, 0)))] == [2, 1]
    host.store(((0, 2), (1, 1), (2, 0)))
    host.load(((0, 0), (1, 1), (2, 2)))
    assert cache.pages[1].view(3, 8).tolist() == [[16, 17, 18, 19, 20, 21, 22, 23], [*range(8, 16)], [*range(8)]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_the_library_come_back_from_host_memory(dtype: str) -> None:
    cache = LibraryPages.allocate(LAYOUT, num_blocks=4, block_size=2, dtype=dtype)  # type: ignore[arg-type]
    for layer, pages in enumerate(cache.pages):
        pages[:] = np.arange(32).reshape(pages.shape) + 100 * layer
    before = [pages.copy() for pages in cache.pages]
    memory = memoryview(bytearray(2 * LAYOUT.block_bytes(2, cache.pages[0].itemsize)))
    host = LibraryHostBlocks(memory, cache, 2)
    host.store(((3, 0), (1, 1)))
    cache.clear_blocks((0, 1, 2, 3))
    host.load(((0, 2), (1, 0)))
    for pages, old in zip(cache.pages, before, strict=True):
        assert (pages[2] == old[3]).all() and (pages[0] == old[1]).all()
        assert not pages[[1, 3]].any()


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_blocks_of_the_library_are_zero_then_copied_and_cleared_in_every_layer(dtype: str, num_bytes: int) -> None:
    cache = LibraryPages.allocate(LAYOUT, num_blocks=4, block_size=2, dtype=dtype)  # type: ignore[arg-type]
    assert (cache.num_blocks, cache.block_size) == (4, 2)
    assert sum(pages.nbytes for pages in cache.pages) == 4 * LAYOUT.block_bytes(2, num_bytes)
    assert not any(pages.any() for pages in cache.pages)
    for layer, pages in enumerate(cache.pages):
        pages[:] = np.arange(1, 5).reshape(4, 1, 1, 1, 1) + 10 * layer
    cache.copy_blocks(((0, 2), (1, 3)))
    cache.copy_blocks(())
    cache.clear_blocks((1,))
    for layer, pages in enumerate(cache.pages):
        first = 1 + 10 * layer
        for block, expected in enumerate((first, 0, first, first + 1)):
            assert (pages[block] == expected).all()


def mapping_flags(address: int) -> list[str]:
    """Returns the kernel's flags of the mapping that contains an address."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        first, end = (int(number, 16) for number in mapping.split(maxsplit=1)[0].split("-"))
        if first <= address < end:
            return mapping.rpartition("VmFlags:")[2].split()
    raise AssertionError(f"no mapping contains {address:#x}")


@pytest.mark.skipif(sys.platform != "linux" or mmap.PAGESIZE != 4096, reason="needs Linux with pages of 4 KiB")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_the_cache_asks_for_huge_pages_and_shares_no_memory_with_other_processes() -> None:
    on_library = LibraryPages.allocate(LAYOUT, num_blocks=3, block_size=2, dtype="float32")
    on_torch = make_cache()
    for address in (on_torch.pages[1].data_ptr(), on_library.pages[1].ctypes.data):
        flags = mapping_flags(address)
        assert "hg" in flags
        assert "sh" not in flags
