"""Simulated gateways: their answers to `/status`, and the tokenizer that each pod takes from an engine.

As in the real gateway, the tokenizer is in the pod's own volume. So a recreated pod is not ready before an engine of
the service serves.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Gateway:
    """One simulated gateway, whose requests a test sets."""

    token: str
    has_text: bool = False
    num_held: int = 0  # sequences
    held_tokens: int = 0
    in_flight: int = 0  # requests that engines compute
    num_finished: int = 0
    started_at: float = field(default_factory=time.monotonic)

    @property
    def is_ready(self) -> bool:
        """True when the readiness probe of its container would succeed."""
        return self.has_text

    def document(self) -> dict[str, Any]:
        """The answer to `/status`, version v1, in the fields that the operator reads."""
        return {
            "version": "v1",
            "engine_version": "0.1.0",
            "state": "serving" if self.has_text else "starting",
            "reason": "" if self.has_text else "waiting for an engine",
            "last_token_age_seconds": None,
            "uptime_seconds": time.monotonic() - self.started_at,
            "model": None,
            "startup": [],
            "ranks": [],
            "requests": {
                "in_flight": self.in_flight + self.num_held,
                "running": 0,
                "waiting": self.num_held,
                "finished": self.num_finished,
                "failed": 0,
                "first_token_seconds": {},
            },
            "load": {"queued_tokens": self.held_tokens},
        }
