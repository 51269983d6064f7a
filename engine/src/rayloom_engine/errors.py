"""The engine's own exceptions. `ValueError` children are what a user can fix; their text says how."""


class EngineError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting that cannot be used. The message names the field, what was given and what is allowed."""


class ModelError(EngineError, ValueError):
    """A model that cannot be served: not found, not supported, or broken files. Raised before weights are read."""


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


class EngineDead(EngineError):
    """The core cannot be brought back. `message` holds the first cause."""


class RankLost(EngineError):
    """A rank died, fell silent or could not do its part. `is_alive`: its process is there and may be used again."""

    def __init__(self, rank: int, cause: str, *, is_alive: bool = False) -> None:
        super().__init__(f"rank {rank}: {cause}")
        self.rank = rank
        self.is_alive = is_alive
