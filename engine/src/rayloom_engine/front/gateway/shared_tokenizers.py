"""SharedTokenizers: one tokenizer in memory for all models with the same tokenizer files."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from weakref import WeakValueDictionary

from rayloom_engine.text.tokenizer import Tokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json")  # the files that Tokenizer.load reads


class SharedTokenizers:
    """Tokenizers by the hash of their files, as long as a model uses them. For one event loop."""

    def __init__(self) -> None:
        self._tokenizers: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()
        # Reading a tokenizer takes twice the memory of the tokenizer. So only one tokenizer is read at a time.
        self._reading = asyncio.Lock()

    async def load(self, folder: Path) -> Tokenizer:
        """Returns the tokenizer in a model folder. Raises ModelError or OSError."""
        async with self._reading:
            key = await asyncio.to_thread(_hash, folder)
            found = self._tokenizers.get(key)
            if found is None:
                found = await asyncio.to_thread(Tokenizer.load, folder)
                self._tokenizers[key] = found
            return found


def _hash(folder: Path) -> bytes:
    whole = hashlib.sha256()
    for name in _FILES:
        path = folder / name
        whole.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else bytes(32))
    return whole.digest()
