"""Measures the time from starting a server's process to the first token of its first answer."""

from __future__ import annotations

import aiohttp

from rayloom_bench.client import first_chat_token
from rayloom_bench.server import ServerFailed, ServerProcess


def start_to_first_token_s(server: ServerProcess, timeout_s: float) -> float:
    """Seconds from the start of the process to the first streamed token of a short chat. Raises ServerFailed."""
    server.wait_ready(timeout_s)
    try:
        return first_chat_token(server.endpoint()) - server.started_s
    except (ValueError, OSError, aiohttp.ClientError) as error:
        raise ServerFailed(f"the first chat request failed: {error}\n{server.log_end()}") from error
