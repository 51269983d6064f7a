"""EngineEstimate: the last reports of an engine's core, and the requests that the gateway has sent since. Pure.

Reports are up to 0.2 s old. So the estimate adds the requests that this gateway has sent since the last report. The
prompts of these requests count as outstanding. If they did not count, all requests of a burst would go to the engine
that was idle at the last report. The blocks of these prompts count as cached, because the engine registers blocks as
soon as it schedules their sequence. If they did not count, requests with the same new prefix would be spread over all
engines. Other gateways' requests are in the next report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rayloom_engine.core.load import SchedulerLoad
from rayloom_engine.protocol.messages import CacheChanges
from rayloom_engine.routing.fairness import tokens_before
from rayloom_engine.routing.prefix_index import PrefixIndex
from rayloom_engine.routing.router import EngineView


@dataclass(slots=True)
class _Sent:
    """A sequence that was sent to the engine, and of which no token has arrived yet."""

    tenant: str
    blocks: tuple[int, ...]
    unreported_tokens: int  # tokens of prefill that are not in the last report; 0 after the next report


class EngineEstimate:
    """A gateway's estimate of an engine's load and cache, for one connection to that engine.

    A new connection begins with a new estimate.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.load = SchedulerLoad()
        self.index = PrefixIndex()
        self._sent: dict[str, _Sent] = {}  # sequence id -> a sequence of which no token has arrived
        # tenant -> outstanding tokens, including those of requests sent since the last report
        self._prefill: Counter[str] = Counter()
        self._num_decodes = 0
        self._decoding: set[str] = set()  # this gateway's sequences of which a token has arrived
        self._is_asked = True  # True: the whole index was requested, and no part of it has arrived
        self._expected: Counter[int] = Counter()  # blocks of sent prompts -> number of these prompts
        self._computed: list[tuple[int, ...]] = []  # blocks of prompts computed since the last report

    def changed(self, changes: CacheChanges) -> bool:
        """Applies changes of the prefix index. Returns False if the caller must request the whole index.

        While the whole index is requested and no part of it has arrived, changes are dropped, and the result is True.
        """
        is_applied = self.index.apply(changes)
        must_ask = not is_applied and not self._is_asked
        self._is_asked = not is_applied
        return not must_ask

    def reported(self, load: SchedulerLoad) -> None:
        self.load = load
        self._prefill = Counter({each.tenant: each.prefill_tokens for each in load.tenants})
        self._num_decodes = load.num_decodes
        for sent in self._sent.values():
            sent.unreported_tokens = 0
        for blocks in self._computed:
            self._forget_expected(blocks)
        self._computed.clear()

    @property
    def num_sequences(self) -> int:
        """Unfinished sequences that this gateway has sent."""
        return len(self._sent) + len(self._decoding)

    @property
    def num_decodes(self) -> int:
        """Sequences that have generated a token, counted over all gateways."""
        return self._num_decodes

    @property
    def outstanding_prefill_tokens(self) -> int:
        """Tokens of prompts that the engine has still to compute, for all gateways."""
        return self._prefill.total()

    def sent(self, sequence_id: str, tenant: str, num_tokens: int, blocks: tuple[int, ...]) -> None:
        """Counts a sequence that is sent to the engine. `num_tokens`, `blocks`: of its prompt and generated tokens."""
        prefill = max(1, num_tokens - self.cached_tokens(blocks))
        self._sent[sequence_id] = _Sent(tenant, blocks, prefill)
        self._prefill[tenant] += prefill
        self._expected.update(blocks)

    def has_token(self, sequence_id: str) -> None:
        """Counts the sequence as a decode from its first token on. Later calls change nothing."""
        if self._leave(sequence_id):
            self._num_decodes += 1
            self._decoding.add(sequence_id)

    def ended(self, sequence_id: str) -> None:
        """Forgets a sequence that is complete or aborted."""
        self._leave(sequence_id)
        if sequence_id in self._decoding:
            self._decoding.discard(sequence_id)
            self._num_decodes = max(0, self._num_decodes - 1)  # the last report may already exclude this decode

    def refused(self, sequence_id: str) -> None:
        """Forgets a refused sequence, and also its blocks, because the engine will not cache these blocks."""
        sent = self._sent.get(sequence_id)
        if sent is not None:
            self._forget_expected(sent.blocks)
            sent.blocks = ()
        self.ended(sequence_id)

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        """Returns how many leading tokens of a prompt with these blocks the engine has cached."""
        return self.index.block_size * self.index.num_leading(blocks, self._expected)

    def view(self, tenant: str, prompt_tokens: int, blocks: Sequence[int]) -> EngineView:
        """Returns the engine as `choose` sees it for a prompt of this tenant."""
        cached = self.cached_tokens(blocks)
        prefill = max(1, prompt_tokens - cached)
        return EngineView(
            name=self.name,
            outstanding_prefill_tokens=tokens_before(tenant, prefill, self._prefill),
            num_decodes=self._num_decodes,
            cached_tokens=cached,
        )

    def _leave(self, sequence_id: str) -> bool:
        sent = self._sent.pop(sequence_id, None)
        if sent is None:
            return False
        self._prefill[sent.tenant] -= sent.unreported_tokens
        if sent.blocks:
            self._computed.append(sent.blocks)
        return True

    def _forget_expected(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._expected[block] -= 1
            if not self._expected[block]:
                del self._expected[block]
