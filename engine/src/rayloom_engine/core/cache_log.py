"""CacheLog: the changes of the prefix index that the core has not published to routers yet."""

from __future__ import annotations


class CacheLog:
    """The net changes of the prefix index. An entry that was added and removed, or removed and added again, is absent.

    An entry is the hash of a block's content. The prefix index adds only entries that it lacks, and removes only
    entries that it has.
    """

    def __init__(self) -> None:
        self._is_added: dict[bytes, bool] = {}  # hash of a block's content -> True: added, False: removed

    def added(self, content: bytes) -> None:
        if self._is_added.pop(content, True):
            self._is_added[content] = True

    def removed(self, content: bytes) -> None:
        if not self._is_added.pop(content, False):
            self._is_added[content] = False

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the (added, removed) hashes since the last call, and empties the log."""
        taken, self._is_added = self._is_added, {}
        return [each for each, is_added in taken.items() if is_added], [
            each for each, is_added in taken.items() if not is_added
        ]
