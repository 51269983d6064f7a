"""Adapter: a LoRA adapter as the scheduler and the ranks name it."""

from __future__ import annotations

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """A folder with a LoRA adapter, and its content. Adapters with the same digest are the same adapter."""

    path: str  # folder, as every rank sees it
    digest: bytes  # hash of the adapter's files, 16 bytes; part of the hashes of KV blocks


class ServedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter under the name by which requests select it."""

    name: str
    adapter: Adapter
    rank: int  # the highest LoRA rank of the adapter's matrices
    created: int  # Unix time


class AdapterLoad(msgspec.Struct, frozen=True):
    """An order to a rank: keep this adapter in an adapter slot from now on, in place of an earlier one."""

    slot: int
    adapter: Adapter
