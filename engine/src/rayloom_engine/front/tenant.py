"""Tenants: whoever sends with one API key. They share slots and queue fairly, and no cached prefixes.

A server with one key, or none, has one tenant without a name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What the scheduler must know of who sent a request."""

    tenant: str = ""
    priority: int = 0  # among the requests of the tenant; lower runs first
    cache_key: bytes = b""  # cached prefixes are shared by requests with equal ones alone; at most 64 bytes


def tenant_of_key(key: bytes, num_keys: int) -> str:
    """A short name of the key's owner, equal in every process and run; empty unless the server has several keys."""
    return hashlib.blake2b(key, digest_size=8, person=b"rayloom-tenant").hexdigest() if num_keys > 1 else ""


def cache_key(tenant: str, salt: str | None) -> bytes:
    """The key of a tenant's requests with this `cache_salt`. Empty without a tenant's name and a salt."""
    if not tenant and salt is None:
        return b""
    # Surrogates can stand in a JSON string, and a salt need not be text. No tenant's name has a NUL.
    given = b"" if salt is None else b"\0" + salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(tenant.encode() + given, digest_size=32).digest()
