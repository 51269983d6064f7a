"""Reads the members of an archive that torch.save has written. Every size is checked before a member is read. Pure."""

from __future__ import annotations

import struct
import zipfile
import zlib
from io import BytesIO

_MOST_MEMBERS = 32  # an archive of one tensor has seven
_MOST_TEXT_BYTES = 1024  # of name, extra fields and comment of a member together; torch.save writes less than 300
_MEMBER_MARK = b"PK\x01\x02"  # begins an entry of the archive's directory
# zipfile raises these for a damaged archive. OverflowError: a position of more than 64 bits. RuntimeError: a member
# that is encrypted, or packed by an unknown method.
_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    LookupError,
    RuntimeError,
)


class BadTensor(ValueError):
    """The bytes are not a saved tensor that can be used. The message says why, and ends before a full stop."""


class Archive:
    """The members of an archive in memory, without its top folder. Nothing is written to files."""

    def __init__(self, data: bytes) -> None:
        """Raises BadTensor."""
        if not data.startswith(b"PK"):
            raise BadTensor("it is not a file of torch.save in its zip format")
        # zipfile reads the whole directory at once. Each entry begins with the mark, which tensors contain by chance
        # once in four billion bytes.
        if data.count(_MEMBER_MARK) > _MOST_MEMBERS:
            raise BadTensor(f"its archive has more than {_MOST_MEMBERS} members; save one tensor alone")
        _check_directory(data)
        try:
            self._zip = zipfile.ZipFile(BytesIO(data))
        except _ERRORS as error:
            raise BadTensor("its archive is damaged") from error
        infos = self._zip.infolist()
        tops = [info.filename.removesuffix("data.pkl") for info in infos if info.filename.endswith("/data.pkl")]
        if len(tops) != 1 or tops[0].count("/") != 1:
            raise BadTensor("its archive has no data.pkl, so it is not a file of torch.save")
        self._infos = {info.filename.removeprefix(tops[0]): info for info in infos}

    def has(self, name: str) -> bool:
        return name in self._infos

    def read(self, name: str, most_bytes: int) -> bytes:
        """Returns the content of a member. Raises BadTensor if it is longer than `most_bytes`, packed or damaged."""
        info = self._infos.get(name)
        if info is None:
            raise BadTensor(f"its archive has no member {name}")
        if info.file_size > most_bytes or info.compress_size > most_bytes:
            raise BadTensor(f"the member {name} of its archive has {info.file_size} bytes, at most {most_bytes} fit")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
            raise BadTensor(f"the member {name} of its archive is compressed or encrypted; torch.save does neither")
        try:
            return self._zip.read(info)
        except _ERRORS as error:
            raise BadTensor(f"the member {name} of its archive is damaged") from error


def _check_directory(data: bytes) -> None:
    """Raises BadTensor if a member has long extra fields, which zipfile reads in square time, name or comment."""
    place = data.find(_MEMBER_MARK)
    while place >= 0:
        lengths = data[place + 28 : place + 34]
        if len(lengths) == 6 and sum(struct.unpack("<HHH", lengths)) > _MOST_TEXT_BYTES:
            raise BadTensor(f"the directory of its archive has an entry of more than {_MOST_TEXT_BYTES} bytes")
        place = data.find(_MEMBER_MARK, place + 1)
