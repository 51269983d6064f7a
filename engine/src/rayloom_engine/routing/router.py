"""The choice of an engine for a request, in tokens of work. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """An engine as the router sees it, for one request."""

    name: str
    is_serving: bool = True
    is_draining: bool = False
    is_suspect: bool = False  # it shows no progress
    outstanding_prefill_tokens: int = 0  # prompt tokens that it has been given and has not computed
    num_decodes: int = 0  # sequences that it generates
    cached_tokens: int = 0  # tokens of this request's prompt that it has in its prefix cache


def choose(
    engines: Sequence[EngineView], *, prompt_tokens: int, decode_token_cost: float, tie_key: bytes
) -> str | None:
    """Returns the name of the engine with the least work before and for the request; None if none can take it.

    `decode_token_cost`: cost of a running decode, in prompt tokens. Among equal engines the same `tie_key` gives the
    same engine (rendezvous hashing).
    """
    able = [engine for engine in engines if engine.is_serving and not engine.is_draining and not engine.is_suspect]
    if not able:
        return None

    def order(engine: EngineView) -> tuple[float, bytes]:
        own = max(0, prompt_tokens - engine.cached_tokens)
        cost = own + engine.outstanding_prefill_tokens + decode_token_cost * engine.num_decodes
        return cost, hashlib.sha256(tie_key + engine.name.encode()).digest()

    return min(able, key=order).name
