"""Shares of API keys ("tenants") over all engines of a service. Pure.

Inside an engine, tenants take turns (core/planning/waiting_queue.py). These functions extend the same rule to several
engines: a tenant's sequences on all engines count together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRequest:
    """A request that waits at the gateway until an engine accepts it."""

    request_id: str
    tenant: str = ""
    arrival: float = 0.0  # Unix time


def in_turns(held: Iterable[HeldRequest], num_unfinished: Mapping[str, int]) -> list[HeldRequest]:
    """Returns the held requests in the order in which engines should get them.

    A request's position is the number of its tenant's unfinished sequences on all engines (`num_unfinished`), plus the
    number of its tenant's earlier held requests. Lower positions come first. So the k-th request of a tenant comes
    before the (k+1)-th request of every other tenant. At equal positions the earlier arrival comes first.
    """
    lines: defaultdict[str, list[HeldRequest]] = defaultdict(list)
    for request in held:
        lines[request.tenant].append(request)
    positions = []
    for tenant, line in lines.items():
        line.sort(key=_by_arrival)
        first = num_unfinished.get(tenant, 0)
        positions += [(first + place, *_by_arrival(request), request) for place, request in enumerate(line)]
    return [request for *_, request in sorted(positions, key=lambda item: item[:3])]


def tokens_before(tenant: str, prompt_tokens: int, outstanding: Mapping[str, int]) -> int:
    """Returns how many outstanding prefill tokens an engine computes before it completes this tenant's next prompt.

    `outstanding`: tenant -> prefill tokens that the engine has to compute. The engine divides its steps' token budget
    equally between tenants. So while the engine computes this tenant's tokens, it computes at most as many tokens of
    each other tenant. Therefore an engine that one tenant floods does not look busy to other tenants. Pass the result
    to `EngineView` as `outstanding_prefill_tokens`.
    """
    own = outstanding.get(tenant, 0)
    share = own + prompt_tokens
    return own + sum(min(tokens, share) for other, tokens in outstanding.items() if other != tenant)


def _by_arrival(request: HeldRequest) -> tuple[float, str]:
    return request.arrival, request.request_id
