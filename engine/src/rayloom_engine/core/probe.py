"""Probes: sequences of one token that the engine adds itself, to prove that every rank still computes."""

from __future__ import annotations

# beginning of the request ids of probes; ids of clients' sequences begin with the number of a connection
PROBE_PREFIX = "probe/"


def is_probe(request_id: str) -> bool:
    return request_id.startswith(PROBE_PREFIX)
