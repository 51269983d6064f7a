"""Loading: which ranks of an assembly are late, by their beats. Reads no socket and no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rayloom_engine.protocol.ranks import Beat


@dataclass(frozen=True, slots=True)
class Late:
    """Ranks of a rebuild to act on."""

    missing: tuple[int, ...] = ()  # not attached for too long
    stuck: tuple[int, str] | None = None  # the first rank whose loading stands still, and its phase


class Loading:
    """Watches all ranks until they have loaded.

    At the first start no rank is late: its node may have no room yet, its download may take hours, and a user sees
    that in the status. In a rebuild the ranks were there before.
    """

    def __init__(self, world_size: int, now: float, *, is_rebuild: bool, missing_s: float, stuck_s: float) -> None:
        """`missing_s`: without a connection; `stuck_s`: without progress; after so long a rank of a rebuild is late."""
        self._world_size = world_size
        self._is_rebuild = is_rebuild
        self._missing_s = missing_s
        self._stuck_s = stuck_s
        self._fence_at = now + missing_s
        self._marks: dict[int, tuple[str, int]] = {}  # rank -> phase and units done at its last advance
        self._marked_at: dict[int, float] = {}  # rank -> time of its last advance

    def observe(self, now: float, beats: Mapping[int, Beat], loaded: Collection[int]) -> Late:
        """The late ranks. `beats`: newest beat of every attached rank; `loaded`: those with weights in place."""
        stuck = None
        for rank, beat in beats.items():
            mark = (beat.phase, beat.done)
            if rank in loaded or self._marks.get(rank) != mark:
                self._marks[rank] = mark
                self._marked_at[rank] = now
            elif self._is_rebuild and stuck is None and now - self._marked_at[rank] > self._stuck_s:
                stuck = (rank, beat.phase)
        return Late(self._missing(now, beats), stuck)

    def _missing(self, now: float, beats: Mapping[int, Beat]) -> tuple[int, ...]:
        """Ranks to fence. No connection of theirs has ended, so the launcher takes them for alive.

        Such a rank may be stopped, or cut off from this machine. The term doubles with every fence, because the node
        may need long to start the rank's container.
        """
        missing = tuple(sorted(set(range(self._world_size)) - set(beats)))
        if not self._is_rebuild or not missing or now <= self._fence_at:
            return ()
        self._missing_s *= 2
        self._fence_at = now + self._missing_s
        return missing
