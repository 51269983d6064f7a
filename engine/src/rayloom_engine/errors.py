"""The engine's own exceptions.

Exceptions that derive from ValueError are faults that users can fix; their messages say how.
"""

import json
import reprlib
from typing import Literal, TypeAlias

# The kinds of model faults, for programs. (People read the message.) NoAccess: the hub needs a token, or refuses
# the given token. Gated: the owner of the token must accept the model's terms. Unreachable: a retry may succeed without
# a change. Invalid: all faults without a kind of their own.
ModelFault: TypeAlias = Literal["NotFound", "NoAccess", "Gated", "Unsupported", "Unreachable", "Invalid"]


CORRUPT_LOGITS = (
    "the model's logits for this request are not finite (NaN or infinity), so no token can be chosen; the weights or "
    "the memory of a rank are damaged, or float16 overflows: serve the model in bfloat16 or float32"
)


class EngineError(Exception):
    """Base class of all errors that this package raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting that cannot be used. The message names the field, its value and the allowed values."""


class ModelError(EngineError, ValueError):
    """A model that cannot be served: not found, not supported, or with broken files."""

    def __init__(self, message: str, fault: ModelFault = "Invalid") -> None:
        super().__init__(message)
        self.fault: ModelFault = fault


class RequestError(EngineError, ValueError):
    """A refused request. `field`: the wrong field of the request; None if no single field is wrong."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFull(EngineError):
    """The waiting queue has no room for a request. The client may try again in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PoisonousRequest(EngineError):
    """A request that was ended because the engine crashed whenever it computed this request."""


class CorruptLogits(EngineError):
    """A request that was ended because its logits contained a NaN, or only infinities."""


class AdapterFailed(EngineError):
    """A request that was ended because a rank could not load the request's LoRA adapter. The message has the cause."""


class GrammarFault(EngineError):
    """A grammar cannot be applied: it is too complex, no token fits, or the tokenizer is not supported.

    The request with this grammar ends.
    """


class CorruptRank(EngineError):
    """This rank computed a NaN or an infinity for a probe: its weights or its memory are damaged.

    The rank has to exit.
    """


class EngineDead(EngineError):
    """The engine has failed for good. The message has the first cause."""


class RankLost(EngineError):
    """A rank died, shows no sign of life, or could not carry out an order.

    `is_alive`: the rank's process is alive and can be used again. `is_silent`: the rank shows no sign of life. Perhaps
    its process is only stopped.
    """

    def __init__(self, rank: int, cause: str, *, is_alive: bool = False, is_silent: bool = False) -> None:
        super().__init__(f"rank {rank}: {cause}")
        self.rank = rank
        self.is_alive = is_alive
        self.is_silent = is_silent


def shown(value: object) -> str:
    """Returns a value of a file or request as one short, printable line, with true, false and null as in JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _SHORT.repr(value)


def word(value: object) -> str:
    """Shortens a name as `shown` does. A short printable name gets no quotation marks, unlike in `shown`."""
    is_plain = isinstance(value, str) and 0 < len(value) <= _MAX_WORD and value.isprintable()
    return str(value) if is_plain else shown(value)


_MAX_WORD = 100  # characters
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = _MAX_WORD
