"""GatewayCounter: counts the requests of gateways, because the engine's own front does not see their results.

A request counts as finished in three cases: its last token is sampled, a gateway has found a stop string in its text,
or an error of the engine ends it. Five kinds of requests do not count: refused requests, requests that move to another
engine, requests whose client or gateway has disconnected, requests whose grammar fails on the rank, and requests whose
adapter cannot be loaded and was not reported by the engine. For each prompt only the first choice counts. If it is
finished when the other choices move, they do not count at their new engine: the request is counted already.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.sequence import BROKEN_ADAPTER, BROKEN_FORM, CORRUPT
from rayloom_engine.protocol.gateway_requests import FIRST_TOKEN_BOUNDS_S, GatewayRequests
from rayloom_engine.protocol.messages import Submit


@dataclass(slots=True)
class _Unfinished:
    since: float | None  # time of the submission; None once this or an earlier engine has sampled the first token
    has_adapter: bool  # the engine had reported the sequence's adapter


class GatewayCounter:
    """Totals of the sequences of gateways. For the core's main thread.

    `request_id` is the scheduler's name of a sequence, which begins with the number of the gateway's connection. Calls
    for sequences of the engine's own front have no effect.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._connections: set[int] = set()
        self._unfinished: dict[str, _Unfinished] = {}
        self._num_finished = 0
        self._num_failed = 0
        self._first_token_counts = [0] * (len(FIRST_TOKEN_BOUNDS_S) + 1)
        self._first_token_s = 0.0

    def connected(self, connection: int) -> None:
        """Counts the sequences of this connection from now on, because its peer is a gateway."""
        self._connections.add(connection)

    def disconnected(self, connection: int) -> None:
        """Forgets a connection. Its unfinished sequences do not count."""
        if connection in self._connections:
            self._connections.remove(connection)
            prefix = f"{connection}."
            for request_id in [each for each in self._unfinished if each.startswith(prefix)]:
                del self._unfinished[request_id]

    def submitted(self, connection: int, request_id: str, submit: Submit, *, has_adapter: bool = True) -> None:
        """Begins to count a sequence, which may still be refused.

        `has_adapter`: False if the engine has not reported the sequence's adapter. A gateway may try such an engine
        with a sequence that another engine began.
        """
        is_further_choice = submit.is_further_choice or submit.fork_of is not None
        if connection in self._connections and not is_further_choice:
            since = None if submit.generated_ids else self._clock()
            self._unfinished[request_id] = _Unfinished(since, has_adapter)

    def forget(self, request_id: str) -> None:
        """Stops counting a sequence: it was refused, moves to another engine, or its client has disconnected."""
        self._unfinished.pop(request_id, None)

    def complete(self, request_id: str) -> None:
        """Counts a sequence as finished without an error."""
        if request_id in self._unfinished:
            del self._unfinished[request_id]
            self._num_finished += 1

    def failed(self, request_id: str) -> None:
        """Counts a sequence as finished by an error of the engine."""
        if request_id in self._unfinished:
            del self._unfinished[request_id]
            self._num_finished += 1
            self._num_failed += 1

    def observe(self, outputs: Iterable[SequenceOutput]) -> None:
        """Counts first tokens and ends of sequences in the outputs of a step."""
        if not self._unfinished:
            return
        now = self._clock()
        for output in outputs:
            request_id = output.sequence_id
            unfinished = self._unfinished.get(request_id)
            if unfinished is None:
                continue
            since = unfinished.since
            if since is not None and output.token_ids:
                unfinished.since = None
                self._first_token_counts[bisect_left(FIRST_TOKEN_BOUNDS_S, now - since)] += 1
                self._first_token_s += now - since
            if output.finish_reason is not None:
                self._end(request_id, output.finish_reason)

    def report(self) -> GatewayRequests:
        """Returns the totals so far."""
        return GatewayRequests(
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            first_token_counts=tuple(self._first_token_counts),
            first_token_s=self._first_token_s,
        )

    def _end(self, request_id: str, finish_reason: str) -> None:
        # With BROKEN_FORM the client gets a 400, so the engine has made no error. An engine that has not reported an
        # adapter need not have its files.
        is_no_fault = finish_reason == BROKEN_ADAPTER and not self._unfinished[request_id].has_adapter
        if finish_reason == BROKEN_FORM or is_no_fault:
            self.forget(request_id)
        elif finish_reason in (CORRUPT, BROKEN_ADAPTER):
            self.failed(request_id)
        else:
            self.complete(request_id)
