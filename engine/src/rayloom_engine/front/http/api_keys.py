"""ApiKeys: the keys that the API port accepts. The file with keys, such as a mounted Secret, may change at any time."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rayloom_engine.errors import ConfigError

KEYS_VARIABLE = "RAYLOOM_API_KEYS"
POLL_S = 2.0  # seconds between two reads of the file; the kubelet itself takes a minute or two to update the file
MAX_FILE_BYTES = 1024 * 1024

logger = logging.getLogger(__name__)


class ApiKeys:
    """The accepted keys. Use it from one event loop. `watch` rereads the file periodically."""

    def __init__(self, fixed: Iterable[str] = (), path: Path | None = None, *, may_start_closed: bool = False) -> None:
        """`fixed`: keys that never change.

        Raises ConfigError if the file at `path` cannot be read or has no key: a mistake in the file must not open the
        server to everybody. With `may_start_closed`, raises nothing: no key of the file is accepted until the file is
        usable.
        """
        self._fixed = tuple(_bytes(key) for key in fixed)
        self._path = path
        self._from_file: tuple[bytes, ...] = ()
        self._content = b""
        self.problem = ""  # why the file is unusable; empty if it is usable. Earlier keys stay valid meanwhile
        self.on_change: Callable[[], None] = lambda: None  # called when the keys or `problem` have changed
        if path is not None:
            try:
                self._take(_read(path))
            except ConfigError as error:
                if not may_start_closed:
                    raise
                self.problem = str(error)
                logger.error("%s; every API key is refused until the file can be read", error)

    @classmethod
    def load(cls, path: str | None, environ: Mapping[str, str]) -> ApiKeys:
        """Returns the keys of the file (one a line) and of RAYLOOM_API_KEYS (comma-separated).

        If neither is set, no key is needed. Raises ConfigError if the file or the variable is given but holds no key.
        """
        fixed: list[str] = []
        if KEYS_VARIABLE in environ:
            fixed = [key.strip() for key in environ[KEYS_VARIABLE].split(",") if key.strip()]
            if not fixed:
                raise ConfigError(
                    f"the environment variable {KEYS_VARIABLE} is set, but has no key, so everybody could use the API; "
                    "give keys separated by commas, or unset it"
                )
        return cls(fixed, None if path is None else Path(path))

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """All keys as clients send them."""
        return self._fixed + self._from_file

    @property
    def is_open(self) -> bool:
        """True if requests need no key."""
        return not self._fixed and self._path is None

    @property
    def num_keys(self) -> int:
        """The number of different keys."""
        return len(set(self.accepted))

    def knows(self, key: bytes) -> bool:
        """True if `key` is accepted. Each comparison takes constant time, so timing reveals no key."""
        return sum(hmac.compare_digest(key, known) for known in self.accepted) > 0

    def num_keys_beside(self, _key: bytes) -> int:
        """Returns `num_keys` for any key: Gate has refused requests with unknown keys on paths that need a key."""
        return self.num_keys

    async def watch(self, poll_s: float = POLL_S) -> None:
        """Rereads the file every `poll_s` until cancelled. Returns at once if there is no file."""
        while self._path is not None:
            await asyncio.sleep(poll_s)
            await self.refresh()

    async def refresh(self) -> None:
        """Rereads the file. An unusable file changes only `problem`.

        Compares the content of the file. The kubelet updates a Secret by replacing a symbolic link, so the modification
        time may stay the same.
        """
        assert self._path is not None
        problem = ""
        is_changed = False
        try:
            content = await asyncio.to_thread(_read, self._path)
            if content != self._content:
                self._take(content)
                is_changed = True
                logger.info("the API keys were read again: %d are accepted", len(self.accepted))
        except ConfigError as error:
            problem = str(error)
        if problem and not self.problem:
            logger.warning("%s; the keys read before it stay in force", problem)
        if is_changed or problem != self.problem:
            self.problem = problem
            self.on_change()

    def _take(self, content: bytes) -> None:
        try:
            lines = content.decode("utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ConfigError(f"api_key_file: cannot read {self._path}: {error}") from error
        keys = tuple(_bytes(line.strip()) for line in lines if line.strip())
        if not keys:
            raise ConfigError(f"api_key_file: {self._path} has no key; write one a line, or leave the setting out")
        self._from_file = keys
        self._content = content


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"api_key_file: cannot read {path}: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"api_key_file: {path} has more than {MAX_FILE_BYTES} bytes; write one key a line")
    return content


def _bytes(key: str) -> bytes:
    # If a key from the environment is not UTF-8, Python represents its invalid bytes as surrogates.
    return key.encode("utf-8", "surrogateescape")
