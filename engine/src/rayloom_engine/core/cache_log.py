"""CacheLog: the changes of the prefix index since they were last taken, for those who route requests by it."""

from __future__ import annotations


class CacheLog:
    """Net changes: a content that was added and removed again, or the other way round, is in neither list.

    The prefix index adds only contents that it does not have, and removes only those that it has.
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
        """Returns (added, removed) contents since the last call."""
        taken, self._is_added = self._is_added, {}
        return [each for each, is_added in taken.items() if is_added], [
            each for each, is_added in taken.items() if not is_added
        ]
