"""The choice of an engine for a request. Pure.

    score of an engine = prefill tokens that it would compute for the request
                       + prefill tokens that it has to compute before the request
                       + decode_token_cost x its running decodes

The engine with the lowest score gets the request. All terms are tokens of prefill, so the user need not set weights for
them. An engine with a cached prefix is chosen if the prefix saves more time than the engine's other work costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayloom_engine.routing.rendezvous import first_by_rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """An engine that can accept the request, as the router sees it. All numbers are at least 0."""

    name: str  # unique among the engines of a choice
    outstanding_prefill_tokens: int = 0  # tokens of running and waiting sequences that are not computed yet
    num_decodes: int = 0  # sequences that have a token already
    cached_tokens: int = 0  # leading tokens of the prompt that the engine has cached


def choose(
    engines: Sequence[EngineView], *, prompt_tokens: int, decode_token_cost: float, tie_key: bytes
) -> str | None:
    """Returns the name of the engine with the lowest score; None if there is no engine.

    `prompt_tokens`: length of the prompt, generated tokens of a resumed sequence included. `decode_token_cost`: time
    that one more decode adds to a step, in units of the time of a prefill token. Of engines with equal scores, the
    first in the rendezvous order of `tie_key` is chosen. So requests with equal keys meet at one engine. When an engine
    leaves, only the requests with the keys of this engine move to other engines.
    """
    lowest = float("inf")
    tied: list[str] = []
    for engine in engines:
        score = _score(engine, prompt_tokens, decode_token_cost)
        if score < lowest:
            lowest = score
            tied = [engine.name]
        elif score == lowest:
            tied.append(engine.name)
    if len(tied) < 2:
        return tied[0] if tied else None
    return first_by_rendezvous(tied, tie_key)


def _score(engine: EngineView, prompt_tokens: int, decode_token_cost: float) -> float:
    # An engine computes the last token of a prompt even if it is cached, because the next token needs its logits.
    own_prefill = max(1, prompt_tokens - engine.cached_tokens)
    return own_prefill + engine.outstanding_prefill_tokens + decode_token_cost * engine.num_decodes
