"""The size of a service's KV cache beside the prediction in its status."""

from __future__ import annotations

import re

from clients.service import Service

_MUCH_MEMORY_KIB = 14 << 20


def expect_predicted_kv_cache(service: Service) -> None:
    """Compares the predicted and the measured size of the KV cache, if the node has enough free memory.

    The prediction for a CPU is 4 GiB. A rank that starts with less than 8 GiB of free memory allocates half of the free
    memory.
    """
    predicted = service.get()["status"]["sizing"]["kvTokens"]
    cache = service.engine_status()["kv_cache"]
    measured = cache["num_blocks"] * cache["block_size"]
    found = re.search(r"MemAvailable: +(\d+) kB", service.client.python("print(open('/proc/meminfo').read())"))
    assert found is not None
    least = 0.95 if int(found[1]) > _MUCH_MEMORY_KIB else 0.0
    assert least <= measured / predicted <= 1.05, f"{predicted / measured - 1:+.1%}, {found[0]}"
