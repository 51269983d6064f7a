"""Probes: one-token sequences of the engine's own, which prove that every rank still computes."""

from __future__ import annotations

PROBE_PREFIX = "probe/"  # no other request id begins so: the core prefixes clients' ids with a connection number


def is_probe(request_id: str) -> bool:
    return request_id.startswith(PROBE_PREFIX)
