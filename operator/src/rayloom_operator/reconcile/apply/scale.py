"""Writes `spec.replicas` through the scale subresource, as a field manager of its own."""

from __future__ import annotations

from rayloom_operator.decide.changes.plan import ScaleWrite
from rayloom_operator.decide.scaling.inputs import SCALER
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import INVALID, Kube, KubeError


async def write_scale(kube: Kube, write: ScaleWrite) -> None:
    """Changes `replicas`, unless somebody else has changed them or the service since.

    Raises OperatorError in that case, and KubeError if the API server refuses the write.
    """
    try:
        await kube.scale(write.path, write.uid, before=write.before, after=write.after, manager=SCALER)
    except KubeError as error:
        if error.code != INVALID:
            raise
        # The API server gives this code for a failed test of the patch, and a policy gives it for a refusal.
        found = await kube.get(write.path)
        if (found["metadata"]["uid"], found["spec"].get("replicas")) == (write.uid, write.before):
            raise
        raise OperatorError("spec.replicas was changed while the scaler decided; it decides again") from error
