"""Type of the setting `kv_host_memory_bytes`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

HostMemoryBytes = Annotated[
    int,
    Field(
        ge=0,
        description="Bytes of host memory of each rank for copies of KV blocks: blocks that were evicted, or lost with "
        "a rank, are loaded again instead of computed. 0: no copies. Allocated at the start, in /dev/shm.",
    ),
]
