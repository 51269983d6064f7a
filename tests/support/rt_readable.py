"""True if data can be read now or soon. Uses poll, because select cannot watch descriptors above 1023."""

from __future__ import annotations

import select
from typing import Any


def is_readable(source: Any, seconds: float) -> bool:
    """Waits up to `seconds` until `source` (a descriptor, or what has a fileno) has something, or has ended."""
    poller = select.poll()
    poller.register(source, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
