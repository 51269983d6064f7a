"""Adapter: how the scheduler and the ranks identify a LoRA adapter."""

from __future__ import annotations

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """The folder of a LoRA adapter, and the digest of its files. Adapters with the same digest are the same adapter."""

    path: str  # path of the folder on every rank
    digest: bytes  # hash of the adapter's files, 16 bytes; part of the hashes of KV blocks


class ServedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter under the name by which requests select it."""

    name: str
    adapter: Adapter
    rank: int  # the highest LoRA rank of the adapter's matrices
    created: int  # Unix time


class AdapterLoad(msgspec.Struct, frozen=True):
    """An order to a rank: load this adapter into an adapter slot, in place of the adapter that is there."""

    slot: int
    adapter: Adapter
