"""A hash that tells two models apart without reading all of their weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLES = 16  # samples of each file, evenly spaced
_SAMPLE_BYTES = 4096


def content_hash(folder: Path) -> str:
    """Returns a hash of config.json and of the name, size and samples of each safetensors file. Raises OSError.

    Training changes nearly every weight, so a sample of 64 KB tells a fine-tuned model from its base.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"/{path.name}/{size}/".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(size * number // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
