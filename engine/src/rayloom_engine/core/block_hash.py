"""Hashes of full KV blocks. Sequences with a common prefix find each other's blocks by these hashes."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

from rayloom_engine.core.embeds import Embeds


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes) -> bytes:
    """Returns the hash of a full block's tokens and of all earlier tokens: 16 bytes, the same in every process and run.

    `parent` is the hash of the block before, empty for the first block. `extra` is made by `encode_extra`. `extra`
    holds everything else on which the block's content depends. It also names the group of requests that may share the
    block. `extra` is part of this block's hash, and through `parent` of the hashes of all later blocks.
    """
    # The lengths come first. Without the lengths, different parts could give the same bytes when joined.
    lengths = struct.pack("<II", len(parent), len(extra))
    return hashlib.blake2b(lengths + parent + extra + array("q", token_ids).tobytes(), digest_size=16).digest()


def next_block_hash(
    hashes: Sequence[bytes],
    token_ids: Sequence[int],
    cache_key: bytes,
    adapter_digest: bytes = b"",
    embeds_digest: bytes = b"",
) -> bytes:
    """Returns the hash of a sequence's next block. `hashes`: hashes of all blocks before this block, in order.

    `token_ids`: tokens of this block alone. `cache_key`: only sequences with equal keys share blocks. `adapter_digest`:
    digest of the adapter with which the block is computed, empty without an adapter. The hash of the first block
    contains `cache_key` and `adapter_digest`, so all later hashes depend on them. `embeds_digest`: digest of the
    embeddings in this block, for which `token_ids` has placeholders; empty if all positions have token ids.
    """
    embeds = [("embeds", embeds_digest)] if embeds_digest else []
    if hashes:
        return block_hash(hashes[-1], token_ids, encode_extra(embeds) if embeds else b"")
    return block_hash(b"", token_ids, encode_extra([("salt", cache_key), ("adapter", adapter_digest), *embeds]))


def prompt_hashes(
    token_ids: Sequence[int],
    block_size: int,
    cache_key: bytes,
    adapter_digest: bytes = b"",
    embeds: Embeds | None = None,
) -> list[bytes]:
    """Returns the hashes under which a scheduler registers the full blocks of a prompt, in order.

    `embeds`: embeddings of all positions, for which `token_ids` has placeholders.
    """
    hashes: list[bytes] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        start = end - block_size
        digest = b"" if embeds is None else embeds.rows(start, end).digest()
        hashes.append(next_block_hash(hashes, token_ids[start:end], cache_key, adapter_digest, digest))
    return hashes


def encode_extra(parts: Iterable[tuple[str, bytes]]) -> bytes:
    """Encodes (kind, value) pairs such as ("salt", ...) as bytes. Different pairs never give the same bytes.

    Pairs with an empty value are left out, so an empty salt gives the same hashes as no salt. The caller must pass the
    pairs in a fixed order.
    """
    encoded = [_field(kind.encode()) + _field(value) for kind, value in parts if value]
    return b"".join(encoded)


def _field(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content
