"""Adapter: how the scheduler and the ranks identify a LoRA adapter."""

from __future__ import annotations

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """The folder of a LoRA adapter, and the digest of its files. Adapters with the same digest are the same adapter."""

    path: str  # path of the folder on every rank, or hf://ORG/NAME@COMMIT
    digest: bytes  # hash of the adapter's files, 16 bytes; part of the hashes of KV blocks


class ServedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, and the name by which requests select it."""

    name: str
    adapter: Adapter
    rank: int  # the highest LoRA rank of the adapter's matrices
    created: int  # Unix time
    source: str = ""  # place on the hub, as it was given; empty for a folder
    num_bytes: int = 0  # size of the larger of the two files, for an adapter of the hub; 0 for a folder


class NeededAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of the hub. Every rank's machine must have the adapter's files before a step uses the adapter."""

    adapter: Adapter
    num_bytes: int  # size of the larger of the adapter's two files
    number: int  # a random number; a repeated load has another number, and so gets a report of its own


class AdapterReport(msgspec.Struct, frozen=True):
    """The end of an attempt to bring the files of a NeededAdapter to a machine."""

    number: int  # of the NeededAdapter
    problem: str = ""  # why the machine does not have the files; empty if it has them


class AdapterLoad(msgspec.Struct, frozen=True):
    """An order to a rank: load this adapter into an adapter slot, in place of the adapter that is there."""

    slot: int
    adapter: Adapter
