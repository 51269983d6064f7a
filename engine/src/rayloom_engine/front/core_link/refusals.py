"""The core's refusals as exceptions, which become answers to clients."""

from __future__ import annotations

from rayloom_engine.errors import AdapterFailed, CorruptLogits, PoisonousRequest, QueueFull, RequestError
from rayloom_engine.front.core_link.engine_choice import MOST_CORRUPT
from rayloom_engine.front.core_link.sequences import Place
from rayloom_engine.protocol.messages import Refused
from rayloom_engine.sampling_params import ContextTooLong


def refusal(refused: Refused) -> Exception:
    """Returns the exception that ends the refused sequence's request."""
    if refused.reason == "queue_full":
        return QueueFull(refused.message, refused.retry_after_s)
    if refused.reason == "poison":
        return PoisonousRequest(refused.message)
    if refused.reason == "corrupt":
        return CorruptLogits(refused.message)
    if refused.reason == "adapter":
        return AdapterFailed(refused.message)
    if refused.reason == "too_long":
        return ContextTooLong(refused.message)
    return RequestError(refused.message)


def may_ask_others(refused: Refused, place: Place) -> bool:
    """True if a gateway may give the refused sequence to another engine.

    The cause of `corrupt` may be the engine: damaged weights, or a release with a mistake. The cause may also be the
    request, so a gateway asks at most MOST_CORRUPT engines. The cause of `adapter` is always the engine's files.
    """
    is_corrupt = refused.reason == "corrupt"
    return refused.reason == "adapter" or (is_corrupt and len(place.corrupt_by) < MOST_CORRUPT)
