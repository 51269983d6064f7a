"""Suspicion: finds the one sequence that kills whatever computes it, by what was in the steps that died.

A death says nothing about a sequence: machines fail too. A sequence is suspect when two deaths hit steps that computed
the same positions of it. While there are suspects only half of them is computed and nobody else, until each of that
half got past these positions (and is no suspect any more) or another death at them leaves only that half suspect. The
last suspect is computed alone; when that step dies at the same positions it is condemned: it fails, and everybody else
goes on.

So every computed part of a prompt is progress, as every token is: deaths of other causes hit a long prompt at positions
that differ, and condemn nobody.

With n sequences in a step this takes 2 + floor(log2 n) + 1 deaths at most.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rayloom_engine.core.spans import Span, overlap

_KEPT_DEATHS = 4  # more than one culprit may die in turns
_KEPT_CONDEMNED = 1024  # a front submits an unfinished sequence within seconds, so older ones do not come back


class Suspicion(msgspec.Struct):
    """Sequences of fronts that never come back stay here. All parts are bounded, and suspects by the size of a step."""

    deaths: list[dict[str, Span]] = []  # the last ones outside trials: sequence id -> positions in flight
    suspects: dict[str, Span] = {}  # sequence id -> positions that all of its deaths have in common
    condemned: list[str] = []  # sequence ids

    def tried(self, in_flight: Mapping[str, Span]) -> dict[str, Span]:
        """The suspects that these plans compute at the suspected positions; when any are, the plans are a trial."""
        common = {name: overlap(span, self.suspects[name]) for name, span in in_flight.items() if name in self.suspects}
        return {name: span for name, span in common.items() if span is not None}

    def died(self, in_flight: dict[str, Span]) -> bool:
        """Books the death of plans with these sequences. True when that narrowed the suspects."""
        tried = self.tried(in_flight)
        if tried:
            if len(self.suspects) == len(in_flight) == 1:
                self.condemned = [*self.condemned, *tried][-_KEPT_CONDEMNED:]
                tried = {}
            self.suspects = tried
            return True
        self.suspects = {}
        for death in self.deaths:
            for name, span in in_flight.items():
                common = overlap(span, death[name]) if name in death else None
                if common is not None:
                    self.suspects[name] = common
        self.deaths = [*self.deaths, in_flight][-_KEPT_DEATHS:]
        return False

    def trial(self, computed: Mapping[str, int]) -> list[str]:
        """The sequences that may be computed now, and nobody else; empty when everybody may.

        `computed`: id -> positions with a result, of every unfinished sequence. Who got past the suspected positions is
        cleared here. The first of `computed` are tried first: when they are the ones that got furthest, they are
        cleared without a death.
        """
        self.suspects = {name: span for name, span in self.suspects.items() if computed.get(name, 0) < span[1]}
        present = [name for name in computed if name in self.suspects]
        return present[: max(1, len(present) // 2)]
