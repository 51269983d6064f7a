"""Suspicion: finds a sequence that crashes every process that computes it.

Compares the sequences in flight at each death of a process. One death is no evidence against a sequence, because
machines fail too. A sequence is suspect if a process has died in each of two steps that computed the same positions of
the sequence. While there are suspects, the engine computes only half of the suspects, and no other sequence. This is a
trial. A trial ends in one of two ways:
- Each sequence of this half has computed its suspected positions: then the whole half is cleared.
- A process dies in a step that computes these positions: then only the sequences of this half remain suspect.
The last suspect is computed alone. If a process dies again at the same positions, the sequence is condemned: its
request fails, and all others continue.

A long prompt is computed in chunks. So deaths that have other causes occur at different positions of the prompt, and do
not condemn its sequence.

With n sequences in a step, at most 2 + floor(log2 n) + 1 deaths are needed to find the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rayloom_engine.core.planning.spans import Span, overlap

# number of deaths that are remembered; more than one, because several sequences may cause deaths in turn
_KEPT_DEATHS = 4
# limit of condemned sequences; a front resubmits unfinished sequences within seconds, so older entries are not needed
_KEPT_CONDEMNED = 1024


class Suspicion(msgspec.Struct):
    """The evidence from the deaths so far: which sequences may crash the engine.

    The entries of a front that never reconnects are not removed. So all fields are bounded: `deaths` and `condemned` by
    constants, and `suspects` and each death by the number of sequences in flight.
    """

    deaths: list[dict[str, Span]] = []  # the last deaths outside trials: sequence id -> its positions in flight
    suspects: dict[str, Span] = {}  # sequence id -> the positions that were in flight at two deaths
    condemned: list[str] = []  # sequence ids

    def tried(self, in_flight: Mapping[str, Span]) -> dict[str, Span]:
        """The suspects whose suspected positions are in flight. If there are any, the plans in flight are a trial."""
        common = {name: overlap(span, self.suspects[name]) for name, span in in_flight.items() if name in self.suspects}
        return {name: span for name, span in common.items() if span is not None}

    def died(self, in_flight: dict[str, Span]) -> bool:
        """Counts a death with these sequences in flight. Returns True if the plans in flight were a trial.

        After a trial, fewer suspects remain.
        """
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

    def may_have_caused_death(self, name: str) -> bool:
        """True if the sequence was in flight at one of the last deaths."""
        return name in self.suspects or any(name in death for death in self.deaths)

    def trial(self, computed: Mapping[str, int]) -> list[str]:
        """Returns the ids of the sequences to which steps are limited now; an empty list if there is no limit.

        `computed`: id -> number of positions with a result, of every unfinished sequence. Suspects that have computed
        their suspected positions are cleared. The first entries of `computed` are tried first. The caller puts the
        sequences with the most generated tokens first. These are the least likely to cause a crash, so they are cleared
        without a death.
        """
        self.suspects = {name: span for name, span in self.suspects.items() if computed.get(name, 0) < span[1]}
        present = [name for name in computed if name in self.suspects]
        return present[: max(1, len(present) // 2)]
