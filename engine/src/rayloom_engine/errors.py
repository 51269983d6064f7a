"""The engine's own exceptions. `ValueError` children are what a user can fix; their text says how."""

import reprlib
from typing import Literal, TypeAlias

# What is wrong with a model, for programs; the message is for people. NoAccess: the hub wants a token, or another one.
# Gated: the token's account has to accept the model's terms. Unreachable: may pass by itself. Invalid: all the rest.
ModelFault: TypeAlias = Literal["NotFound", "NoAccess", "Gated", "Unsupported", "Unreachable", "Invalid"]


CORRUPT_LOGITS = (
    "the model's logits for this request are not finite (NaN or infinity), so no token can be chosen; the weights or "
    "the memory of a rank are damaged, or float16 overflows: serve the model in bfloat16 or float32"
)


class EngineError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting that cannot be used. The message names the field, what was given and what is allowed."""


class ModelError(EngineError, ValueError):
    """A model that cannot be served: not found, not supported, or broken files. Raised before weights are read."""

    def __init__(self, message: str, fault: ModelFault = "Invalid") -> None:
        super().__init__(message)
        self.fault: ModelFault = fault


class RequestError(EngineError, ValueError):
    """A request that is refused. `field` is the request field at fault, or None when no single one is."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFull(EngineError):
    """No room in the waiting queue; try again in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PoisonousRequest(EngineError):
    """A request that was ended because the engine died whenever it computed it."""


class CorruptLogits(EngineError):
    """A request that was ended because its logits held a NaN or nothing but infinities."""


class CorruptRank(EngineError):
    """This rank computed a NaN or an infinity for a probe: its weights or its memory are damaged, and it must end."""


class EngineDead(EngineError):
    """The core cannot be brought back. `message` holds the first cause."""


class RankLost(EngineError):
    """A rank died, fell silent or could not do its part.

    `is_alive`: its process is there and may be used again. `is_silent`: it shows no sign of life; it may be stopped.
    """

    def __init__(self, rank: int, cause: str, *, is_alive: bool = False, is_silent: bool = False) -> None:
        super().__init__(f"rank {rank}: {cause}")
        self.rank = rank
        self.is_alive = is_alive
        self.is_silent = is_silent


def shown(value: object) -> str:
    """A value out of a file or a request as a message shows it: in one printable line, and short."""
    return _SHORT.repr(value)


def word(value: object) -> str:
    """The same for a name, which stays without quotation marks where it is short and printable."""
    is_plain = isinstance(value, str) and 0 < len(value) <= _MAX_WORD and value.isprintable()
    return str(value) if is_plain else shown(value)


_MAX_WORD = 100  # characters
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = _MAX_WORD
