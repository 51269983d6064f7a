"""Decides which engines may compute a sequence with a LoRA adapter. Only reads the state of the links.

An adapter is identified by the digest of its files: engines may have it in different folders, under different names.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rayloom_engine.core.adapter import Adapter
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.sequences import ClientSequence


def with_adapter(usable: list[EngineLink], links: Iterable[EngineLink], sequence: ClientSequence) -> list[EngineLink]:
    """Returns the engines of `usable` that may compute the sequence. `links`: all engines of the pool.

    If an engine has the adapter, only engines with the adapter may compute the sequence. For this rule, an engine that
    leaves the list counts only if it has the sequence now. If no engine that counts has it, a sequence that has begun
    may continue on any engine that has reported its adapters and has room for some: the files of the adapter may still
    exist. An engine without room refuses the sequence for good, so the sequence waits for another engine. A sequence
    that has not begun gets no engine.
    """
    adapter = sequence.params.adapter
    if adapter is None:
        return usable
    if any(_has(link, adapter) for link in links if not link.is_leaving or link.name == sequence.place.engine):
        return [link for link in usable if _has(link, adapter)]
    return [link for link in usable if link.takes_adapters] if _has_begun(sequence) else []


def is_unloaded(links: Iterable[EngineLink], sequence: ClientSequence) -> bool:
    """True if no engine has begun the sequence, and all engines report that they do not have its adapter.

    An engine that has not reported its adapters yet may have the adapter.
    """
    adapter = sequence.params.adapter
    if adapter is None or _has_begun(sequence):
        return False
    known = [link for link in links if not link.is_leaving]
    return bool(known) and all(link.adapters is not None and not _has(link, adapter) for link in known)


def may_load(links: Iterable[EngineLink], sequence: ClientSequence) -> bool:
    """True if an engine has the sequence's adapter and has not failed to load it for this sequence.

    The engine need not be usable now: it may recover, drain, be silent for seconds, or have a full queue. An engine
    that leaves the list does not count, and neither does an engine that has computed a NaN for the sequence.
    """
    adapter, place = sequence.params.adapter, sequence.place
    return adapter is not None and any(
        _has(link, adapter)
        and not link.is_leaving
        and link.name not in place.no_adapter_on
        and link.name not in place.corrupt_by
        for link in links
    )


def adapt(link: EngineLink, choices: Iterable[ClientSequence]) -> None:
    """Replaces each sequence's adapter by this engine's entry for the same adapter, which may name another folder."""
    for sequence in choices:
        adapter = sequence.params.adapter
        if adapter is None or adapter in (link.adapters or ()):
            continue
        own = next((each for each in link.adapters or () if each.digest == adapter.digest), None)
        if own is not None:
            sequence.params = msgspec.structs.replace(sequence.params, adapter=own)


def _has_begun(sequence: ClientSequence) -> bool:
    return bool(sequence.place.engine or sequence.place.last_engine)


def _has(link: EngineLink, adapter: Adapter) -> bool:
    return any(adapter.digest == each.digest for each in link.adapters or ())
