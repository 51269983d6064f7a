"""Suspicion: finds the one sequence that kills whatever computes it, by what was in the steps that died.

A death says nothing about a sequence: machines fail too. A sequence is suspect when two deaths hit steps that contained
it and it got no token in between. While there are suspects only half of them is computed and nobody else, until each
of that half got a token (and is no suspect any more) or another death leaves only that half suspect. The last suspect
is computed alone; when that step dies as well it is condemned: it fails, and everybody else goes on.

With n sequences in a step this takes 2 + floor(log2 n) + 1 deaths at most.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_KEPT_DEATHS = 4  # more than one culprit may die in turns


class Suspicion(msgspec.Struct):
    """Progress is told by numbers of tokens: a sequence that died with n known tokens is cleared by its next one.

    So a token that a restarted core computes once more, because the front had not got it, clears nobody.
    """

    deaths: list[dict[str, int]] = []  # the last ones outside trials: sequence id -> tokens it had
    suspects: dict[str, int] = {}  # sequence id -> most tokens it had when it died
    condemned: list[str] = []  # sequence ids

    def died(self, in_flight: dict[str, int]) -> bool:
        """Books the death of a step with these sequences (id -> tokens known). True when that narrowed the suspects."""
        tried = {name: max(num, self.suspects[name]) for name, num in in_flight.items() if name in self.suspects}
        if not tried:
            self.suspects = {
                name: num for name, num in in_flight.items() if any(num <= death.get(name, -1) for death in self.deaths)
            }
            self.deaths = [*self.deaths, in_flight][-_KEPT_DEATHS:]
            return False
        if len(self.suspects) == len(in_flight) == 1:
            self.condemned.extend(tried)
            tried = {}
        self.suspects = tried
        return True

    def trial(self, known: Mapping[str, int]) -> list[str]:
        """The sequences that may be computed now, and nobody else; empty when everybody may.

        `known`: id -> tokens of every unfinished sequence. Who made progress is cleared here. The first of `known` are
        tried first: when they are the ones that got furthest, they are cleared without a death.
        """
        self.suspects = {name: num for name, num in self.suspects.items() if known.get(name, num) <= num}
        present = [name for name in known if name in self.suspects]
        return present[: max(1, len(present) // 2)]
