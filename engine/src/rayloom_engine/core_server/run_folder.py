"""RunFolder: files in the server's run folder with the state that outlives an EngineCore process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rayloom_engine.common.process import drain_mark
from rayloom_engine.common.whole_file import write_whole
from rayloom_engine.core.step import FIRST_EPOCH
from rayloom_engine.protocol.ranks import Welcomed


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSizes:
    """The sizes that the first EngineCore process chose, and the commit. Every later process uses the same.

    A later process may find less free memory. If it chose its own sizes, it might not be able to continue sequences
    that were accepted before. The branch of a hub model may have a newer commit later. Other weights would continue
    sequences with other tokens.
    """

    num_kv_blocks: int
    max_model_len: int  # tokens
    commit: str | None = None  # of the hub model

    def welcomed(self) -> Welcomed:
        """Returns the message for ranks that connect."""
        return Welcomed(num_kv_blocks=self.num_kv_blocks, max_model_len=self.max_model_len, commit=self.commit)


class RunFolder:
    """Reads and writes the files of the run folder. Only the EngineCore's main thread may write them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def token(self) -> str:
        """The secret that API server processes and ranks present when they connect."""
        return (self.path / "token").read_text().strip()

    def is_draining(self) -> bool:
        """True if the engine was asked to drain. Gateways must learn this even before the front has connected."""
        return drain_mark(self.path).exists()

    def draw_epoch(self) -> int:
        """Returns a new epoch: a number that this server has not used for an epoch before."""
        file = self.path / "epoch"
        if not file.exists():
            write_whole(file, _epoch_text(FIRST_EPOCH))
            return FIRST_EPOCH
        epoch = int(file.read_text()) + 1
        # Overwritten in place, because a full disk has no room for a new file. The length is always the same, and the
        # kernel writes so few bytes in one piece.
        with file.open("r+b", buffering=0) as opened:
            opened.write(_epoch_text(epoch))
        return epoch

    def sizes(self) -> KeptSizes | None:
        """Returns the first EngineCore's sizes, or None if no EngineCore of this server has chosen sizes yet."""
        file = self.path / "sizing.json"
        return KeptSizes(**json.loads(file.read_text())) if file.exists() else None

    def keep_sizes(self, sizes: KeptSizes) -> None:
        write_whole(self.path / "sizing.json", json.dumps(asdict(sizes)).encode())


def _epoch_text(epoch: int) -> bytes:
    return f"{epoch:020d}".encode()
