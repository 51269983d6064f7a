"""Spans: the positions of a sequence that the plans in flight compute.

A span [start, end) says two things: all positions below `start` have a result, and the positions of the span may be the
cause if a process dies now. A sequence can be the cause of two deaths only if its two spans at these deaths overlap.
"""

from __future__ import annotations

from collections.abc import Iterable

from rayloom_engine.core.planning.step_builder import InFlight
from rayloom_engine.core.sequence import Sequence, SequenceState

Span = tuple[int, int]  # positions [start, end)


def spans_of(in_flight: Iterable[InFlight]) -> dict[Sequence, Span]:
    """Returns the span of every sequence in the plans `in_flight` (oldest first).

    Sequences that have ended meanwhile are left out.
    """
    spans: dict[Sequence, Span] = {}
    for record in in_flight:
        sequences = record.sequences
        computed = {
            sequence: (step.start, step.start + step.num_tokens)
            for step in record.plan.slots
            if (sequence := sequences[step.slot]).state is not SequenceState.FINISHED
        }
        for sequence in computed.keys() & spans.keys():
            computed[sequence] = (spans[sequence][0], computed[sequence][1])
        spans |= computed
    return spans


def overlap(first: Span, second: Span) -> Span | None:
    """Returns the positions that are in both spans; None if there are none."""
    start = max(first[0], second[0])
    end = min(first[1], second[1])
    return (start, end) if start < end else None
