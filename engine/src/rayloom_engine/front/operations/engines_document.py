"""The `/engines` document of a gateway's admin port: every engine, its state, work and cache."""

from __future__ import annotations

from typing import Any

import msgspec

from rayloom_engine.front.core_link.core_client import CoreClient
from rayloom_engine.front.core_link.engine_link import EngineLink


def engines_document(client: CoreClient) -> dict[str, Any]:
    """Returns the document as JSON types."""
    return {
        "engines": [_engine(link) for link in client.pool.links.values()],
        "waiting": sum(sequence.place.engine is None for sequence in client.unfinished()),
    }


def _engine(link: EngineLink) -> dict[str, Any]:
    status = link.status
    state = "disconnected"
    if link.is_connected:
        state = "connected" if status is None else status.state
    return {
        "name": link.name,
        "address": link.core.address.removeprefix("tcp:"),
        "state": state,
        "draining": link.is_connected and link.is_draining,
        "leaving": link.is_leaving,
        "protocol": link.version,
        "tls": link.is_connected and link.is_encrypted,
        "sequences": link.estimate.num_sequences,
        "prefill_tokens": link.estimate.outstanding_prefill_tokens,
        "decodes": link.estimate.num_decodes,
        "decode_token_cost": link.estimate.load.decode_token_cost,
        "cached_blocks": len(link.estimate.index),
        "fingerprint": None if link.fingerprint is None else msgspec.to_builtins(link.fingerprint),
    }
