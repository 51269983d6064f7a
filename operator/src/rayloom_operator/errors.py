"""The operator's own exceptions. Each message is a sentence that a user can act on."""


class OperatorError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(OperatorError, ValueError):
    """A manifest that cannot be used.

    `problems` has a line for each invalid field: its value and the change that is needed.
    """

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DoesNotFit(SpecError):
    """A valid manifest that asks for more memory than the accelerators have."""


class NotAllowed(SpecError):
    """A valid manifest that asks for a privilege that the operator's settings do not allow."""


class MemoryUnknown(SpecError):
    """A valid manifest without the memory of its accelerator, which no node's labels give either."""


class EngineUnavailable(OperatorError):
    """The engine cannot be started, or its answer breaks its contract."""


class EngineEnded(OperatorError):
    """The engine's process ended by itself. `exit_code` follows the shell: 128 + N for signal N."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Refused(OperatorError):
    """An object cannot be created or changed before somebody changes the spec or the cluster."""
