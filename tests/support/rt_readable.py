"""Waits until a descriptor is readable. Uses poll, because select cannot watch descriptors above 1023."""

from __future__ import annotations

import select
from typing import Any


def is_readable(source: Any, seconds: float) -> bool:
    """True if `source` (a descriptor, or an object with a fileno) has data or ends within `seconds`."""
    poller = select.poll()
    poller.register(source, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
