"""Probes: one-token sequences of the engine itself, which prove that every rank still computes."""

from __future__ import annotations

PROBE_PREFIX = "probe/"  # no other request id has it: ids of clients begin with a connection number


def is_probe(request_id: str) -> bool:
    return request_id.startswith(PROBE_PREFIX)
