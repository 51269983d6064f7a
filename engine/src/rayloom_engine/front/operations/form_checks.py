"""FormChecks: checks whether grammars can be enforced. Tenants take turns, each with a limited number of grammars."""

from __future__ import annotations

from collections import Counter

from rayloom_engine.errors import QueueFull
from rayloom_engine.front.http.turns import Turns
from rayloom_engine.grammar.validate import is_known, validate

MAX_WAITING = 64  # the most grammars of a tenant that wait for their check; a grammar has at most 64 KB


class FormChecks:
    """Checks one new grammar at a time. For one event loop."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._waiting: dict[str, Counter[str]] = {}  # tenant -> grammar -> number of requests that wait for the check

    async def check(self, grammar: str, field: str, tenant: str) -> tuple[str, ...]:
        """Returns the warnings about a grammar.

        Raises GrammarRefused if the grammar cannot be enforced, and QueueFull if MAX_WAITING other grammars of the
        tenant wait.
        """
        if is_known(grammar):
            return await validate(grammar, field)
        waiting = self._waiting.setdefault(tenant, Counter())
        if grammar not in waiting and len(waiting) >= MAX_WAITING:
            of_one_key = " of this API key" if tenant else ""
            raise QueueFull(f"{len(waiting)} other forms of answers{of_one_key} are being checked; try again soon", 1)
        waiting[grammar] += 1
        try:
            async with self._turns.turn(tenant):
                return await validate(grammar, field)
        finally:
            waiting[grammar] -= 1
            if not waiting[grammar]:
                del waiting[grammar]
            if not waiting:
                del self._waiting[tenant]
