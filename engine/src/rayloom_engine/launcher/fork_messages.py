"""Messages between the launcher and its fork server. Each packet on their connection is one message.

The fork server imports all modules that a rank needs, and the launcher needs none of these modules. So the messages
have a module of their own.
"""

from __future__ import annotations

import msgspec

MAX_MESSAGE_BYTES = 4096


class StartRank(msgspec.Struct, frozen=True, tag=True):
    rank: int
    incarnation: int
    device: str | None  # the rank's CUDA device; None = CPU


class KillRank(msgspec.Struct, frozen=True, tag=True):
    rank: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The fork server has finished its imports."""


class Killed(msgspec.Struct, frozen=True, tag=True):
    """SIGKILL was sent to the rank. RankEnd follows once the rank's process has ended."""

    rank: int


class RankEnd(msgspec.Struct, frozen=True, tag=True):
    rank: int
    code: int  # exit code, or the negative number of the signal that killed it
