"""Memory that the kernel may back with huge pages: reading it in large strides then misses the TLB less often."""

from __future__ import annotations

import contextlib
import mmap

# Linux kernels with larger pages have larger huge pages, too: up to 512 MiB. A single write would allocate such a huge
# page.
_PAGE_BYTES_WITH_SMALL_HUGE_PAGES = 4096


def huge_mapping(num_bytes: int) -> mmap.mmap:
    """Returns a private mapping of zeros. A page takes memory when it is first written.

    The mapping has huge pages of 2 MiB where the kernel grants them on request, and ordinary pages elsewhere.
    """
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and mmap.PAGESIZE == _PAGE_BYTES_WITH_SMALL_HUGE_PAGES:
        with contextlib.suppress(OSError):  # the kernel may be built without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
