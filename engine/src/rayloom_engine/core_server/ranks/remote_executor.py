"""RemoteExecutor: runs plans on the attached ranks. All ranks get each plan; the last stage's first rank answers."""

from __future__ import annotations

from collections import deque

from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.core_server.ranks.pool import RankPool
from rayloom_engine.errors import RankLost
from rayloom_engine.protocol.ranks import Computed, Failed, Run

_POLL_SECONDS = 0.25  # seconds between checks of the heartbeats


class RemoteExecutor:
    """Implements `engine.Executor`. Once it has raised RankLost, the ranks must be assembled again."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._tickets: deque[int] = deque()  # tickets of plans without a result, oldest first
        # results; they arrive in the order of the plans, because one rank answers all plans
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        ticket = self._pool.ticket()
        self._tickets.append(ticket)
        self._pool.order(Run(ticket, plan))

    def collect(self) -> StepResult:
        while not self._results:
            for number, reply in self._pool.poll(_POLL_SECONDS, is_due=True):
                if reply.ticket not in self._tickets:
                    continue  # a late answer to an order that was sent before a loss
                if isinstance(reply, Failed):
                    raise RankLost(number, reply.message, is_alive=True)
                if isinstance(reply, Computed):
                    self._pool.suspects.clear()
                    self._tickets.remove(reply.ticket)
                    self._results.append(reply.result)
            self._check_all_there()
        return self._results.popleft()

    def forget_all(self) -> None:
        """Drops all plans and ignores late answers to them. The next assembly empties the slots of the ranks."""
        self._tickets.clear()
        self._results.clear()

    def check(self) -> None:
        """Raises RankLost if a rank was lost while no plan was in flight."""
        self._pool.poll(0.0)
        self._check_all_there()

    def _check_all_there(self) -> None:
        """Raises RankLost if a rank has connected again, because such a rank has lost its slots and KV cache."""
        arrived = self._pool.take_arrivals()
        if arrived:
            raise RankLost(arrived[0], "it was started again, or lost its connection for a moment", is_alive=True)
