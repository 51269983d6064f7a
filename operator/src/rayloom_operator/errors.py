"""The operator's own exceptions. Each message is a sentence that a user can act on."""


class OperatorError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(OperatorError, ValueError):
    """A manifest that cannot be used. `problems` has one line for each wrong field: its value, and what to change."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DoesNotFit(SpecError):
    """A valid manifest that asks for more memory than the accelerators have."""


class NotAllowed(SpecError):
    """A valid manifest that asks for a privilege that the operator's settings do not allow."""


class MemoryUnknown(SpecError):
    """A valid manifest without `spec.accelerator.memory`, where no node's labels give that memory either."""


class EngineUnavailable(OperatorError):
    """The engine cannot be started or reached, or its answer has an unexpected form."""


class EngineEnded(OperatorError):
    """The engine's process exited by itself. `exit_code` is as in a shell: 128 + N after signal N."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Refused(OperatorError):
    """An object cannot be created or changed until somebody changes the spec or the cluster. A retry does not help.

    `has_scaled`: the plan's write of `replicas` was carried out, and only another change was refused.
    """

    has_scaled = False
