"""Waits in a drain for the sequences of gateways. The core has these sequences, but this front does not."""

from __future__ import annotations

import asyncio

from rayloom_engine.front.core_link.core_client import CoreClient
from rayloom_engine.front.operations.lifecycle import Lifecycle

# For this many seconds after the start of a drain, sequences of gateways may still arrive. Gateways send sequences
# until the core has reported the drain to them.
SETTLED_S = 0.2
_CHECK_S = 0.05


def num_in_core(client: CoreClient) -> int:
    """Returns how many sequences the core has, according to its newest status; 0 if there is no usable core."""
    status = client.status
    if status is None or not client.is_connected or status.state == "failed":
        return 0
    return status.stats.num_running + status.stats.num_waiting


async def wait_for_empty_core(client: CoreClient, lifecycle: Lifecycle, timeout_s: float) -> bool:
    """Waits in a drain until the core has no sequences. Returns False if it still has any after `timeout_s`.

    The core sends a status every second, so the wait may end a second late.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not _is_known_to_be_empty(client, lifecycle):
                await asyncio.sleep(_CHECK_S)
    except TimeoutError:
        return num_in_core(client) == 0
    return True


def _is_known_to_be_empty(client: CoreClient, lifecycle: Lifecycle) -> bool:
    status = client.status
    if status is None or not client.is_connected or status.state == "failed":
        return True
    is_settled = status.is_draining and lifecycle.drain_age_s - client.status_age_s >= SETTLED_S
    return is_settled and num_in_core(client) == 0
