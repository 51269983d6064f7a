"""The limits of a gateway's engines: which prompts they take, and how long an answer may be by default."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.engine_pool import EnginePool
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.protocol.fingerprint import Fingerprint, continuation


def with_contexts(text: ModelText, stored: int, pool: EnginePool) -> ModelText:
    """Returns `text` with the limits of the engines that have its model; `text` itself if nothing changes.

    The longest context decides which prompts are too long. It may belong to an engine that is lost for a moment,
    because requests can wait for that engine. The contexts of connected engines decide the default length of answers.
    `stored`: the length that came with the text. It counts until every engine in the list has sent a status. If one
    engine takes embeddings, the gateway takes them.
    """
    links = [link for link in pool.links.values() if not link.is_leaving]
    known = [length for link in links if (length := _length(link, text.model.fingerprint)) is not None]
    connected = {_length(link, text.model.fingerprint) for link in links if link.is_connected} - {None}
    is_whole = bool(known) and all(link.status is not None for link in links)
    longest = max(known if is_whole else [*known, stored])
    contexts = tuple(sorted(each for each in connected if each is not None))
    sizes = [link.hidden_size for link in links if _length(link, text.model.fingerprint) is not None]
    hidden_size = max(sizes if is_whole else [*sizes, text.model.hidden_size])
    if (longest, contexts, hidden_size) == (text.model.max_model_len, text.contexts, text.model.hidden_size):
        return text
    model = msgspec.structs.replace(text.model, max_model_len=longest, hidden_size=hidden_size)
    return replace(text, model=model, contexts=contexts)


def _length(link: EngineLink, model: Fingerprint | None) -> int | None:
    """The engine's context length; None if it is not known, or the engine has another model."""
    return None if continuation(model, link.fingerprint) == "other model" else link.max_model_len
