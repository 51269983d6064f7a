"""Identities of full KV blocks, by which sequences with a common prefix find each other's blocks."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes) -> bytes:
    """Identity of a full block: its tokens and everything before them. 16 bytes, equal in every process and run.

    `parent` is the hash of the block before, empty for the first block. `extra`, made by `encode_extra`, holds
    everything else that the content of this block depends on, and the group of requests that may share the block. The
    extra of a block is part of its hash and so of the hashes of all blocks after it.
    """
    # Lengths first: bytes of one part can never be taken for bytes of another part.
    lengths = struct.pack("<II", len(parent), len(extra))
    return hashlib.blake2b(lengths + parent + extra + array("q", token_ids).tobytes(), digest_size=16).digest()


def encode_extra(parts: Iterable[tuple[str, bytes]]) -> bytes:
    """Returns the bytes of (kind, value) pairs such as ("salt", ...); different pairs never give the same bytes.

    Pairs with an empty value are left out, so that a request without a salt has the hashes of a request that needs no
    extra at all. The caller gives the pairs in a fixed order.
    """
    encoded = [_field(kind.encode()) + _field(value) for kind, value in parts if value]
    return b"".join(encoded)


def _field(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content
