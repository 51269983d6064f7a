"""Standstill: ranks that show signs of life and do not get on, and which of them the others wait for."""

from __future__ import annotations

from collections.abc import Mapping

from rayloom_engine.protocol.ranks import Beat


def who_stands_still(beats: Mapping[int, Beat]) -> int:
    """The rank to blame when none advances: one that computes, else one that never began, else the one furthest behind.

    Ranks that wait for a peer come last: what they wait for is what stands still.
    """
    return min(beats, key=lambda rank: (beats[rank].waits, beats[rank].phase != "step", beats[rank].advance, rank))


class Standstill:
    """Watches the beats of all ranks while an answer is due."""

    def __init__(self, hang_seconds: float) -> None:
        self._hang_seconds = hang_seconds
        self._mark: dict[int, tuple[str, int]] | None = None
        self._since = 0.0

    def reset(self) -> None:
        """Nothing is due."""
        self._mark = None

    def observe(self, now: float, beats: Mapping[int, Beat]) -> int | None:
        """The rank that stands still, once no rank has advanced for longer than hang_seconds."""
        mark = {rank: (beat.phase, beat.advance) for rank, beat in beats.items()}
        if mark != self._mark:
            self._mark, self._since = mark, now
        return who_stands_still(beats) if now - self._since > self._hang_seconds else None
