"""Probes: sequences of one token that the engine adds itself, to prove that every rank still computes."""

from __future__ import annotations

PROBE_PREFIX = "probe/"  # request ids of clients cannot begin so: they begin with the number of a connection


def is_probe(request_id: str) -> bool:
    return request_id.startswith(PROBE_PREFIX)
