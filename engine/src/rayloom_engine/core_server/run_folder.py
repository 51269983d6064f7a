"""RunFolder: the state that outlives one start of the EngineCore process, in files of the server's run folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSizes:
    """Sizes of the first EngineCore, which every later one takes.

    A later EngineCore may find less free memory, and could then not continue sequences that the first one accepted.
    """

    num_kv_blocks: int
    max_model_len: int  # tokens


class RunFolder:
    """Written by the EngineCore's main thread alone."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def token(self) -> str:
        """The secret that API server processes and ranks present when they connect."""
        return (self.path / "token").read_text().strip()

    def draw_epoch(self) -> int:
        """A number that no epoch of this server had before."""
        file = self.path / "epoch"
        epoch = int(file.read_text()) + 1 if file.exists() else 1
        _write_whole(file, str(epoch))
        return epoch

    def sizes(self) -> KeptSizes | None:
        """The sizes of the first EngineCore; None when no EngineCore of this server has started before."""
        file = self.path / "sizing.json"
        return KeptSizes(**json.loads(file.read_text())) if file.exists() else None

    def keep_sizes(self, sizes: KeptSizes) -> None:
        _write_whole(self.path / "sizing.json", json.dumps(asdict(sizes)))


def _write_whole(path: Path, text: str) -> None:
    """Writes all of `text` or nothing: a process that is killed here must not leave half a file to the next one."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)
