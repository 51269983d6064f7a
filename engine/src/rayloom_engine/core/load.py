"""SchedulerLoad: the work that a scheduler still has. A router compares the loads of engines (`routing/`).

Not to be confused with MeasuredLoad, which an autoscaler reads in `/status`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from rayloom_engine.core.block_pool import BlockPool
from rayloom_engine.core.cached_tokens import CachedTokens
from rayloom_engine.core.probe import is_probe
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence


class TenantLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one tenant, that is of all clients with the same API key."""

    tenant: str  # name of the tenant; empty unless there are several API keys
    # uncomputed tokens of the tenant's running prefills and waiting sequences, without tokens found in the cache
    prefill_tokens: int = 0


class SchedulerLoad(msgspec.Struct, frozen=True, kw_only=True):
    num_decodes: int = 0  # running sequences of which only the newest token is not computed yet
    decode_token_cost: float = 1.0  # measured seconds of a decoded token / measured seconds of a prompt's token
    tenants: tuple[TenantLoad, ...] = ()  # tenants with prompts to compute, sorted by name


class LoadCount:
    """Adds up the tokens that sequences still have to compute, for a SchedulerLoad.

    Probes do not count. If they did, an idle engine would look busy until its next report. Meanwhile a router would
    prefer the other engines.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._cached = CachedTokens(config, pool)
        self._prefill: defaultdict[str, int] = defaultdict(int)
        self._num_decodes = 0

    def add_running(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if is_probe(sequence.request_id):
                continue
            num_uncomputed = sequence.num_tokens - sequence.num_computed
            if num_uncomputed > 1:
                self._prefill[sequence.tenant] += num_uncomputed
            else:
                self._num_decodes += 1

    def add_waiting(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if is_probe(sequence.request_id):
                continue
            self._prefill[sequence.tenant] += sequence.num_tokens - self._cached.of(sequence)

    def load(self, decode_token_cost: float) -> SchedulerLoad:
        return SchedulerLoad(
            num_decodes=self._num_decodes,
            decode_token_cost=decode_token_cost,
            tenants=tuple(
                TenantLoad(tenant=name, prefill_tokens=tokens) for name, tokens in sorted(self._prefill.items())
            ),
        )
