"""Files that other processes may read at any time, even after this process was killed while it wrote them."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file in one operation, so that no reader finds half of its content. Raises OSError."""
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(content)
    unfinished.replace(path)
