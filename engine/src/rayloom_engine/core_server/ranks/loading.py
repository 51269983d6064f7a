"""Loading: decides from the ranks' heartbeats (beats) which ranks of a rebuild are late. Reads no socket or clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rayloom_engine.core_server.ranks.stillness import Stillness
from rayloom_engine.protocol.ranks import Beat


@dataclass(frozen=True, slots=True)
class Late:
    """The ranks that are late in a rebuild."""

    missing: tuple[int, ...] = ()  # ranks that have been without a connection for too long
    stuck: tuple[int, str] | None = None  # (rank, phase) of the first rank that hangs, as stillness.py defines it


class Loading:
    """Watches all ranks until they have loaded their weights.

    At the first start no rank counts as late: a rank may wait for a node with room, or download for hours. The status
    tells the user why a rank waits. In a rebuild a rank may be late, because all ranks had loaded before.
    """

    def __init__(self, world_size: int, now: float, *, is_rebuild: bool, missing_s: float, stuck_s: float) -> None:
        """In a rebuild, a rank is late after `missing_s` without a connection, or `stuck_s` without progress or work.

        Work is CPU time, as in stillness.py. On a busy machine a rank may import for minutes, and its replacement would
        need as long.
        """
        self._world_size = world_size
        self._is_rebuild = is_rebuild
        self._missing_s = missing_s
        self._stuck_s = stuck_s
        self._fence_at = now + missing_s
        self._stillness: dict[int, Stillness] = {}  # rank -> its progress and CPU time

    def observe(self, now: float, beats: Mapping[int, Beat], loaded: Collection[int]) -> Late:
        """Returns the late ranks. `beats`: newest beat of every attached rank. `loaded`: ranks that have loaded."""
        stuck = None
        for rank, beat in beats.items():
            stillness = self._stillness.setdefault(rank, Stillness())
            stillness.observe(now, None if rank in loaded else (beat.phase, beat.done), beat.cpu_s)
            if self._is_rebuild and stuck is None and stillness.is_hung(self._stuck_s):
                stuck = (rank, beat.phase)
        return Late(self._missing(now, beats), stuck)

    def _missing(self, now: float, beats: Mapping[int, Beat]) -> tuple[int, ...]:
        """Returns the ranks that have been missing for too long. The caller fences them.

        Such a rank may be stopped, or cut off from this machine. The launcher may then count it as alive. The wait for
        the next fence is twice as long, because the node may take long to start the rank's container.
        """
        missing = tuple(sorted(set(range(self._world_size)) - set(beats)))
        if not self._is_rebuild or not missing or now <= self._fence_at:
            return ()
        self._missing_s *= 2
        self._fence_at = now + self._missing_s
        return missing
