"""Tenants: all clients with the same API key are one tenant.

Tenants share slots and the queue fairly. They never share cached prefixes. A server with one key or none has a single
tenant, without a name. If such a server has a key, cached prefixes still belong to the key's owner.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rayloom_engine.core.adapter import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, as the scheduler sees it."""

    tenant: str = ""  # empty if the server has one key or none
    priority: int = 0  # compared among the tenant's requests; the lowest runs first
    cache_key: bytes = b""  # only requests with equal keys share cached prefixes; at most 64 bytes
    adapter: Adapter | None = None  # the LoRA adapter that the request names as its model
    # time.monotonic at which the request began to wait for the tokenizer or an adapter of its model; None: it did not
    waits_since_s: float | None = None


def owner_of_key(key: bytes, num_keys: int) -> str:
    """Returns a short name of the key's owner, the same in every process and run. Empty if the server has no keys.

    Cached prefixes are kept by owner, and keys may change while the server runs. So the name does not depend on the
    number of keys. If a server's only key is replaced, the new key must not reuse prefixes of the old key.
    """
    return hashlib.blake2b(key, digest_size=8, person=b"rayloom-tenant").hexdigest() if num_keys else ""


def tenant_of_key(key: bytes, num_keys: int) -> str:
    """Returns the owner's name. Slots, queue places and memory are counted under this name.

    Empty unless the server has several keys.
    """
    return owner_of_key(key, num_keys) if num_keys > 1 else ""


def cache_key(owner: str, salt: str | None) -> bytes:
    """Returns the key under which a request's prefixes are cached, equal for an owner's requests with the same salt.

    Empty if there is neither an owner nor a salt.
    """
    if not owner and salt is None:
        return b""
    # A salt may be any JSON string, even with lone surrogates. The NUL separates the salt from the owner's name, which
    # never contains a NUL.
    given = b"" if salt is None else b"\0" + salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(owner.encode() + given, digest_size=32).digest()
