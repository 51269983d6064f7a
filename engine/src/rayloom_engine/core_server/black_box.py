"""BlackBox: two files that outlive the EngineCore.

For each sequence in flight, one file has the positions that the plans compute (`core.planning.spans`). The other file
has the sequences that are suspected of crashes. The files are written without fsync: they must survive the process, but
need not survive a crash of the machine. An incomplete record is ignored: its process was killed during the write.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from rayloom_engine.common.process import silence_mark, trial_mark
from rayloom_engine.common.whole_file import write_whole
from rayloom_engine.core.planning.spans import Span
from rayloom_engine.core.suspicion import Suspicion

logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


class BlackBox:
    """The records of one EngineCore and its ranks.

    A record names each sequence by the id that its front chose. This id stays the same when the core restarts.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the files of the last EngineCore process. If it died with plans in flight, counts the death."""
        path = folder / "in_flight"
        self._suspicion_path = folder / "suspicion"
        self.suspicion = _read(self._suspicion_path, Suspicion) or Suspicion()
        self._in_flight = _read(path, dict[str, Span]) or {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.is_trial = False  # True while the plans in flight are a trial of suspects
        self._trial_mark = trial_mark(folder)
        self._trial_mark.unlink(missing_ok=True)
        was_silent = silence_mark(folder).exists()
        self.died(was_silent=was_silent)
        silence_mark(folder).unlink(missing_ok=True)

    def note(self, in_flight: dict[str, Span]) -> None:
        """Records the spans of the plans in flight, by sequence id. Pass an empty map if no plan is in flight."""
        self._in_flight = in_flight
        is_trial = bool(self.suspicion.suspects and self.suspicion.tried(in_flight))
        with contextlib.suppress(OSError):  # a full disk must not stop the engine
            os.pwrite(self._file, _framed(in_flight), 0)
            if is_trial and not self.is_trial:
                self._trial_mark.touch()
            elif self.is_trial and not is_trial:
                self._trial_mark.unlink(missing_ok=True)
        self.is_trial = is_trial

    def died(self, *, was_silent: bool = False) -> bool:
        """Counts the death of a rank or of the previous EngineCore. Returns True if fewer suspects remain.

        `was_silent`: the process had shown no sign of life before it died. An outside cause may have stopped the
        process, so no sequence is blamed.
        """
        in_flight = self._in_flight
        suspicion = self.suspicion
        if not in_flight:
            return False
        self.note({})  # emptied first, because this death must not count twice if this function crashes
        if was_silent:
            return False
        condemned_before = set(suspicion.condemned)
        is_narrower = suspicion.died(in_flight)
        self.save()
        for name in set(suspicion.condemned) - condemned_before:
            logger.warning("sequence %s is ended: steps that contain it die, also when it is alone", name)
        if suspicion.suspects:
            logger.warning("%d sequences are suspect: steps that contain them died", len(suspicion.suspects))
        return is_narrower

    def save(self) -> None:
        """Writes the suspicion to its file, for the next EngineCore process."""
        with contextlib.suppress(OSError):
            write_whole(self._suspicion_path, _framed(self.suspicion))


def _framed(content: Suspicion | dict[str, Span]) -> bytes:
    data = _encoder.encode(content)
    return len(data).to_bytes(4, "big") + data


def _read(path: Path, kind: type[T]) -> T | None:
    """Returns the record in the file, or None if the file is missing or holds only a part of a record."""
    try:
        data = path.read_bytes()
        # Bytes after the record are left over from an earlier, longer record.
        return msgspec.msgpack.decode(data[4 : 4 + int.from_bytes(data[:4], "big")], type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
