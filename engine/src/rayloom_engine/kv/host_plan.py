"""Computes how many KV blocks the host memory of a rank holds. Pure; the caller measures the memory."""

from __future__ import annotations

from rayloom_engine.errors import ConfigError
from rayloom_engine.kv.memory import GIB

_KEPT_PART = 10  # one part of so many of the free memory is kept, for a step and for other processes


def num_host_slots(
    wanted_bytes: int, block_bytes: int, *, free_bytes: int, allocated_bytes: int = 0, ranks_on_host: int = 1
) -> int:
    """Returns the number of blocks in `wanted_bytes`, the setting kv_host_memory_bytes; each rank has so many bytes.

    `free_bytes`: free memory of the machine, beside the `allocated_bytes` that its ranks have allocated for this
    already. `ranks_on_host`: ranks of all engines on the machine. Raises ConfigError if no block fits into the bytes,
    or if the bytes do not fit into the memory.
    """
    if wanted_bytes < block_bytes:
        raise ConfigError(
            f"kv_host_memory_bytes: {wanted_bytes} bytes hold no KV block, because a block of this rank has "
            f"{block_bytes} bytes; give at least as many, or 0 for no copies"
        )
    most = (free_bytes - free_bytes // _KEPT_PART + allocated_bytes) // ranks_on_host
    if wanted_bytes > most:
        raise ConfigError(
            f"kv_host_memory_bytes: {wanted_bytes / GIB:.2f} GiB for each rank, but the ranks on this machine "
            f"({ranks_on_host}, of all engines) have room for at most {most / GIB:.2f} GiB each, because a tenth of "
            "the free memory is kept; lower kv_host_memory_bytes, or give the machine or container more memory"
        )
    return wanted_bytes // block_bytes
