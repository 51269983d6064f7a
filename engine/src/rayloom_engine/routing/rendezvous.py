"""Rendezvous hashing: an order of engines for each key, the same in every process. Pure.

Each engine has a hash for each key, and the engine with the highest hash comes first. When an engine leaves, the order
of the other engines stays the same. So a key moves to another engine only if the departed engine came first for this
key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

# A tie key covers at most this many blocks of a prompt. With blocks of 16 tokens, requests meet at one engine if
# their first 64 tokens are equal. With more blocks, conversations that share only a short system prompt would be sent
# to different engines. With fewer blocks, only the first lines of the chat template would decide, and these lines are
# equal in all conversations.
TIE_BLOCKS = 4


def first_by_rendezvous(names: Iterable[str], key: bytes) -> str:
    """Returns the name with the highest hash for `key`. There must be at least one name."""
    return max(names, key=lambda name: (_hash(name, key), name))


def tie_key(block_hashes: Sequence[bytes], otherwise: bytes) -> bytes:
    """Returns the key under which prompts with the same first blocks meet at one engine.

    `block_hashes`: hashes of the prompt's full blocks, in order. `otherwise`: the key of a prompt without a full block,
    such as the request's id. A block's hash depends on all blocks before it, so one hash identifies the beginning of
    the prompt.
    """
    first = block_hashes[:TIE_BLOCKS]
    return first[-1] if first else otherwise


def _hash(name: str, key: bytes) -> bytes:
    # The key's length is hashed, too. Without it, other pairs of key and name could give the same bytes.
    length = len(key).to_bytes(4, "big")
    return hashlib.blake2b(length + key + name.encode(), digest_size=8).digest()
