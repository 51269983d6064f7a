"""Threads in which llguidance reads grammars: its recursion along chains of rules needs a large stack."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

_STACK_BYTES = 256 * 1024 * 1024  # virtual memory; only the touched pages become resident
_setting = threading.Lock()


def deep_stack_pool(name: str) -> ThreadPoolExecutor:
    """Returns a pool of one thread with a large stack. The thread is already started."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    # If other code of this process starts a thread during this block, the thread also gets the large stack. That does
    # no harm.
    with _setting:
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            pool.submit(int).result()
        finally:
            threading.stack_size(usual_bytes)
    return pool
