"""Standstill: detects that no rank makes progress although heartbeats arrive, and finds the rank to blame."""

from __future__ import annotations

from collections.abc import Mapping

from rayloom_engine.core_server.ranks.stillness import Stillness
from rayloom_engine.protocol.ranks import Beat


def rank_to_blame(beats: Mapping[int, Beat]) -> int:
    """Returns the rank to blame if no rank makes progress.

    A rank that computes is blamed first, then a rank that has not begun the step. A rank that waits for a peer is
    blamed only if all ranks wait. Otherwise a rank that does not wait is the cause. Among ranks in the same situation,
    the rank with the least progress is blamed.
    """
    return min(beats, key=lambda rank: (beats[rank].waits, beats[rank].phase != "step", beats[rank].advance, rank))


class Standstill:
    """Watches the beats of all ranks while an answer to a plan is due."""

    def __init__(self) -> None:
        self._ranks: dict[int, Stillness] = {}
        self.quiet_s: float | None = None  # seconds since a computing rank progressed or used CPU; None: no such rank

    def reset(self) -> None:
        """Forgets all beats, because no answer is due."""
        self._ranks = {}
        self.quiet_s = None

    def observe(self, now: float, beats: Mapping[int, Beat], patience_s: float) -> int | None:
        """Returns the rank that hangs, once no rank has made progress for longer than `patience_s`; else None.

        A rank that computes and uses CPU time is slow, not hung. While there is such a rank, the ranks that wait for it
        are not to blame. A rank that computes without using CPU time is hung.
        """
        mark = {rank: (beat.phase, beat.advance) for rank, beat in beats.items()}
        for rank, beat in beats.items():
            self._ranks.setdefault(rank, Stillness()).observe(now, mark, beat.cpu_s)
        at_work = [rank for rank, beat in beats.items() if beat.phase == "step" and not beat.waits]
        self.quiet_s = min((self._ranks[rank].quiet_s for rank in at_work), default=None)
        if not any(self._ranks[rank].still_s > patience_s for rank in beats):
            return None
        computing = {rank: beat for rank, beat in beats.items() if beat.phase == "step" and not beat.waits}
        hung = {rank: beat for rank, beat in computing.items() if self._ranks[rank].is_hung(patience_s)}
        if len(hung) < len(computing):
            return rank_to_blame(hung) if hung else None
        return rank_to_blame(beats)
