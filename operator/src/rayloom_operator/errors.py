"""The operator's own exceptions. Each message is a sentence that a user can act on."""


class OperatorError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(OperatorError, ValueError):
    """A manifest that cannot be used. `problems` holds one line per field at fault: what was given, what to change."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DoesNotFit(SpecError):
    """A manifest that is right in itself, but asks for more memory than there is."""


class NotAllowed(SpecError):
    """A manifest that is right in itself, but asks for what the operator's settings do not allow."""


class MemoryUnknown(SpecError):
    """A manifest that leaves out how much memory an accelerator has, and no node says it."""


class EngineUnavailable(OperatorError):
    """The engine cannot be started, or does not answer as its contract says."""


class EngineEnded(OperatorError):
    """The engine's process ended although nobody asked it to. `exit_code` follows the shell: 128 + N for signal N."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Refused(OperatorError):
    """An object of ours cannot be made until somebody changes the spec or the cluster."""
