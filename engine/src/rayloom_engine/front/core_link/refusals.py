"""The core's refusals as exceptions, which become answers to clients."""

from __future__ import annotations

from rayloom_engine.errors import CorruptLogits, PoisonousRequest, QueueFull, RequestError
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
    if refused.reason == "too_long":
        return ContextTooLong(refused.message)
    return RequestError(refused.message)
