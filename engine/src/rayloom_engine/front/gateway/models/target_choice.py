"""The target of an alias for one request: at random by weight, or always the same target for the same key. Pure.

With a key, the choice is weighted rendezvous hashing: each target has a hash u of the key, uniform in (0, 1), and the
target with the highest weight / -ln(u) gets the request. So each target gets its share of the keys. When a weight
rises, keys move only to this target; when it falls, they move only away from it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

Target = tuple[str, int]  # name of a model, and its weight


def target_by_key(targets: Sequence[Target], key: str) -> str:
    """Returns the model that gets all requests with `key`, in every process. At least one weight must be above 0."""
    return max((_score(name, weight, key), name) for name, weight in targets if weight > 0)[1]


def target_by_draw(targets: Sequence[Target], draw: float) -> str:
    """Returns the model for `draw`, a random number in [0, 1). At least one weight must be above 0."""
    left = draw * sum(weight for _, weight in targets)
    usable = [(name, weight) for name, weight in targets if weight > 0]
    for name, weight in usable:
        left -= weight
        if left < 0:
            return name
    return usable[-1][0]  # rounding: the sum of all weights is not above the drawn number


def _score(name: str, weight: int, key: str) -> float:
    # The text begins with the key's length, so that two different pairs of key and name never have the same text.
    text = f"{len(key)}:{key}{name}".encode("utf-8", "surrogatepass")
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"rayloom-alias").digest())
    return weight / -math.log((number + 0.5) / 2**64)
