"""Suspicion: finds a sequence that crashes every process that computes it, from the contents of the steps that died.

A single death is no evidence against a sequence: machines fail too. A sequence is suspect when two deaths hit steps
that computed the same positions of it. While there are suspects, only half of them are computed, and no other sequence:
a trial. It ends when each of that half has computed these positions and is cleared, or when another death at these
positions leaves only that half suspect. The last suspect is computed alone; when that step dies at the same positions,
the sequence is condemned: it fails, and all others continue.

Every computed part of a prompt is progress, as every token is. Deaths of other causes hit a long prompt at different
positions, and condemn no sequence.

With n sequences in a step this takes 2 + floor(log2 n) + 1 deaths at most.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rayloom_engine.core.planning.spans import Span, overlap

_KEPT_DEATHS = 4  # several crashing sequences may cause deaths alternately
_KEPT_CONDEMNED = 1024  # a front submits unfinished sequences again within seconds, so older ones do not return


class Suspicion(msgspec.Struct):
    """All parts are bounded, suspects by the size of a step: sequences of fronts that never return stay here."""

    deaths: list[dict[str, Span]] = []  # the last ones outside trials: sequence id -> positions in flight
    suspects: dict[str, Span] = {}  # sequence id -> positions that its deaths have in common
    condemned: list[str] = []  # sequence ids

    def tried(self, in_flight: Mapping[str, Span]) -> dict[str, Span]:
        """The suspects that these plans compute at their suspected positions. With any, the plans are a trial."""
        common = {name: overlap(span, self.suspects[name]) for name, span in in_flight.items() if name in self.suspects}
        return {name: span for name, span in common.items() if span is not None}

    def died(self, in_flight: dict[str, Span]) -> bool:
        """Counts the death of plans with these sequences. True when it left fewer suspects."""
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
        """The only sequences that may be computed now; empty when all may.

        `computed`: id -> number of positions with a result, of every unfinished sequence. Suspects beyond their
        suspected positions are cleared here. The first of `computed` are tried first: order them by their tokens,
        because sequences with the most tokens are the least likely to crash again and are cleared without a death.
        """
        self.suspects = {name: span for name, span in self.suspects.items() if computed.get(name, 0) < span[1]}
        present = [name for name in computed if name in self.suspects]
        return present[: max(1, len(present) // 2)]
