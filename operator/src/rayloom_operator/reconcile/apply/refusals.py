"""Separates the API server's answers on which a user has to act from failures that a retry may cure. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rayloom_operator.errors import OperatorError, Refused
from rayloom_operator.kube.client import INVALID, NOT_FOUND, KubeError

# HTTP codes of answers that no retry changes: a user has to change the spec or the cluster.
_REFUSALS = (400, 403, NOT_FOUND, INVALID)
# The API server answers code 500 with this text if a field is unknown in the object's definition or has a wrong type.
# Only a user's pod template can cause this answer: the operator has validated all other fields before.
_UNTYPED = "failed to create typed patch object"
_FIELDS_OF_TEMPLATES = (
    (".spec.headGroupSpec.template.", "spec.podTemplate.head."),
    (".spec.workerGroupSpecs[0].template.", "spec.podTemplate.worker."),
)
_MAX_MESSAGE = 1000


def most_urgent(errors: Iterable[OperatorError]) -> OperatorError:
    """Returns the first Refused, because a user has to act on it; without a Refused, the first failure.

    The other failures may pass in a retry.
    """
    return min(map(as_refusal, errors), key=lambda error: not isinstance(error, Refused))


def as_refusal(error: OperatorError) -> OperatorError:
    """Returns a Refused if a user has to act before a retry can succeed. If not, returns `error` itself."""
    if not isinstance(error, KubeError):
        return error
    message = str(error)
    if _UNTYPED in message:
        for field, ours in _FIELDS_OF_TEMPLATES:
            message = message.replace(field, ours)
    elif error.code not in _REFUSALS or "being terminated" in message:
        # A terminating namespace refuses every new object. No user has to act: the namespace's LLMServices will be
        # deleted as well.
        return error
    return Refused(f"the API server refused: {message[:_MAX_MESSAGE]}")
