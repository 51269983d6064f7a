"""Tells answers of the API server that a user has to act on from failures that a retry may cure. Pure."""

from __future__ import annotations

from rayloom_operator.errors import OperatorError, Refused
from rayloom_operator.kube.client import INVALID, NOT_FOUND, KubeError

# HTTP codes of answers that stay the same until a user changes the spec or the cluster.
_REFUSALS = (400, 403, NOT_FOUND, INVALID)
# The API server answers code 500 to a field that the object's definition lacks, or whose type is another. In objects of
# the operator only fields of the spec's pod template can be such: everything else is checked before.
_UNTYPED = "failed to create typed patch object"
_FIELDS_OF_TEMPLATES = (
    (".spec.headGroupSpec.template.", "spec.podTemplate.head."),
    (".spec.workerGroupSpecs[0].template.", "spec.podTemplate.worker."),
)
_MAX_MESSAGE = 1000


def as_refusal(error: OperatorError) -> OperatorError:
    """Returns a Refused for an answer that stays the same until a user acts; `error` itself for any other."""
    if not isinstance(error, KubeError):
        return error
    message = str(error)
    if _UNTYPED in message:
        for field, ours in _FIELDS_OF_TEMPLATES:
            message = message.replace(field, ours)
    elif error.code not in _REFUSALS or "being terminated" in message:
        # A terminating namespace refuses everything, until its services are gone as well.
        return error
    return Refused(f"the API server refused: {message[:_MAX_MESSAGE]}")
