"""Writes `spec.replicas` through the scale subresource, as a field manager of its own."""

from __future__ import annotations

from rayloom_operator.decide.changes.plan import ScaleWrite
from rayloom_operator.decide.scaling.inputs import SCALER
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import INVALID, Kube, KubeError


async def write_scale(kube: Kube, write: ScaleWrite) -> None:
    """Sets `replicas`, unless somebody has changed the spec since the decision, or recreated the service.

    Raises OperatorError in both cases, and KubeError if the API server refuses the write.
    """
    # A Scale shows neither the rest of the spec nor the generation. So the whole object is read here, and the write
    # tests the version that was read.
    found = await kube.get(write.path)
    if (found["metadata"]["uid"], found["metadata"]["generation"]) != (write.uid, write.generation):
        raise _changed()
    version = found["metadata"]["resourceVersion"]
    try:
        await kube.scale(write.path, version, write.after, SCALER)
    except KubeError as error:
        if error.code != INVALID:
            raise
        # Two failures have this code: the patch's test of the version, and the refusal of an admission policy.
        found = await kube.get(write.path)
        if found["metadata"]["resourceVersion"] == version:
            raise
        raise _changed() from error


def _changed() -> OperatorError:
    return OperatorError("the service was changed while the scaler decided; it decides again")
