"""Decides which engines may compute a sequence with a LoRA adapter. Only reads the state of the links.

An adapter is known by the digest of its files: engines may have it in different folders, and under different names.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rayloom_engine.core.adapter import Adapter
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.sequences import ClientSequence


def with_adapter(usable: list[EngineLink], links: Iterable[EngineLink], sequence: ClientSequence) -> list[EngineLink]:
    """Returns the engines of `usable` that may compute the sequence. `links`: all engines of the pool.

    If the adapter has been unloaded everywhere, a sequence that an engine has begun may go to any engine that has
    reported its adapters: the files may still be there, and requests finish with an adapter that is unloaded. As long
    as its own engine has the adapter, it stays there, even if that engine leaves: another one may take no adapters.
    """
    adapter = sequence.params.adapter
    if adapter is None:
        return usable
    if any(_has(link, adapter) for link in links if not link.is_leaving or link.name == sequence.place.engine):
        return [link for link in usable if _has(link, adapter)]
    return [link for link in usable if link.adapters is not None] if _has_begun(sequence) else []


def is_unloaded(links: Iterable[EngineLink], sequence: ClientSequence) -> bool:
    """True if no engine has begun the sequence, and none has its adapter: it was unloaded since the request came.

    Engines that have not reported their adapters yet may have it.
    """
    adapter = sequence.params.adapter
    if adapter is None or _has_begun(sequence):
        return False
    known = [link for link in links if not link.is_leaving]
    return bool(known) and all(link.adapters is not None and not _has(link, adapter) for link in known)


def adapt(link: EngineLink, choices: Iterable[ClientSequence]) -> None:
    """Gives the sequences their adapter as this engine has it: in another folder, perhaps."""
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
