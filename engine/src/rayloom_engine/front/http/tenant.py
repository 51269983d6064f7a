"""Tenants: all clients with the same API key are one. Tenants share slots and queue fairly, and no cached prefixes.

A server with one key, or none, has one tenant without a name. Cached prefixes belong to the key's owner even then.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, as the scheduler needs it."""

    tenant: str = ""
    priority: int = 0  # among the requests of the tenant; lower runs first
    cache_key: bytes = b""  # only requests with equal keys share cached prefixes; at most 64 bytes


def owner_of_key(key: bytes, num_keys: int) -> str:
    """A short name of the key's owner, equal in every process and run; empty when the server has no keys.

    Cached prefixes depend on the owner, so its name does not depend on the number of keys. Keys may change while the
    server runs, and today's only key must not find the prefixes of yesterday's only key.
    """
    return hashlib.blake2b(key, digest_size=8, person=b"rayloom-tenant").hexdigest() if num_keys else ""


def tenant_of_key(key: bytes, num_keys: int) -> str:
    """The owner's name where slots, queue and memory are shared; empty unless the server has several keys."""
    return owner_of_key(key, num_keys) if num_keys > 1 else ""


def cache_key(owner: str, salt: str | None) -> bytes:
    """The key of an owner's requests with this `cache_salt`. Empty without an owner's name and a salt."""
    if not owner and salt is None:
        return b""
    # Surrogates can stand in a JSON string, and a salt need not be text. No owner's name has a NUL.
    given = b"" if salt is None else b"\0" + salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(owner.encode() + given, digest_size=32).digest()
