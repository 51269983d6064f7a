"""KeyRing: the API keys of all models and aliases. Finds the names that a key may use, in equal time for all keys.

A key is looked up by its hash, which depends on a secret of this process. So the time of a lookup reveals nothing about
the keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rayloom_engine.front.http.api_keys import POLL_S, ApiKeys

NO_NAMES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """The sender of a request, identified by an API key."""

    key: bytes
    names: frozenset[str]  # the names whose key files have the key


class KeyRing:
    """The API keys of all models and aliases. Implements `KeyCheck` for the API port. For one event loop."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._paths: dict[str, str | None] = {}
        self._sources: dict[str, ApiKeys] = {}
        self._counts: dict[frozenset[str], int] = {}  # cache of `count`: names -> number of their keys
        self._names_of: dict[bytes, frozenset[str]] = {}  # hash of a key -> names whose files have the key
        self.on_change: Callable[[], None] = lambda: None  # called when `watch` finds changed keys

    def set_files(self, paths: Mapping[str, str | None]) -> None:
        """Sets the key file of each name that has keys of its own. None: the name needs no key.

        A name refuses every key until its file has been read once without an error.
        """
        sources = {}
        for name, path in paths.items():
            known = self._sources.get(name)
            if known is None or self._paths[name] != path:
                known = ApiKeys(path=None if path is None else Path(path), may_start_closed=True)
                known.on_change = self._changed
            sources[name] = known
        self._sources = sources
        self._paths = dict(paths)
        self._index()

    async def watch(self, poll_s: float = POLL_S) -> None:
        """Rereads all files every `poll_s` until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            for keys in [each for each in self._sources.values() if not each.is_open]:
                await keys.refresh()

    @property
    def is_open(self) -> bool:
        """True if no name needs a key."""
        return all(keys.is_open for keys in self._sources.values())

    @property
    def num_keys(self) -> int:
        """The number of different keys of all names."""
        return len(self._names_of)

    def num_keys_beside(self, key: bytes) -> int:
        """Returns `num_keys` if `key` is one of the keys, else 0, even if `knows` accepts the key."""
        return self.num_keys if self._hash(key) in self._names_of else 0

    def knows(self, key: bytes) -> bool:
        """True if `key` may use at least one name."""
        has_name = self._hash(key) in self._names_of
        return has_name or any(keys.is_open for keys in self._sources.values())

    def caller(self, key: bytes) -> KeyHolder:
        """Returns the sender of a request with `key`."""
        return KeyHolder(key, self._names_of.get(self._hash(key), NO_NAMES))

    def needs_key(self, name: str) -> bool:
        """True if `set_files` gave a file for `name`: a request then needs a key in that file."""
        return not self._sources[name].is_open

    def accepts(self, name: str, caller: KeyHolder) -> bool:
        """True if `caller` may use `name`, which must be one of the names given to `set_files`."""
        return name in caller.names or not self.needs_key(name)

    def count(self, names: frozenset[str]) -> int:
        """Returns how many different API keys the files of `names` have together."""
        if names not in self._counts:
            self._counts[names] = len(set[bytes]().union(*(self._sources[name].accepted for name in names)))
        return self._counts[names]

    def problem(self, name: str) -> str:
        """Returns why the file of `name` cannot be used; empty if the file is usable."""
        return self._sources[name].problem

    def unusable(self) -> list[tuple[str, str, int]]:
        """Returns the sorted names whose files cannot be used, each with the cause and the number of valid keys."""
        found = ((name, keys.problem, len(keys.accepted)) for name, keys in sorted(self._sources.items()))
        return [each for each in found if each[1]]

    def _changed(self) -> None:
        self._index()
        self.on_change()

    def _index(self) -> None:
        names_of: dict[bytes, set[str]] = {}
        for name, keys in self._sources.items():
            for key in keys.accepted:
                names_of.setdefault(self._hash(key), set()).add(name)
        self._counts.clear()
        self._names_of = {digest: frozenset(names) for digest, names in names_of.items()}

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=16, key=self._secret).digest()
