"""The scaler's writes to and from zero on a real API server, which refuses a write if the service has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from api.own_client import with_kube
from rayloom_operator.decide.changes.plan import ScaleWrite
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import INVALID, Kube, KubeError
from rayloom_operator.reconcile.apply.scale import write_scale
from real_api_server.world import LLM, World

Make = Callable[..., dict[str, Any]]


def test_a_number_is_written_from_and_to_zero_but_never_over_a_later_change(
    world: World, namespace: str, manifest: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stop_operators()
    made = world.create(manifest(autoscaling={"maxReplicas": 4}))
    path = f"{LLM}/namespaces/{namespace}/llmservices/{made['metadata']['name']}"

    async def work(kube: Kube) -> None:
        async def write(number: int) -> dict[str, Any]:
            meta = (await kube.get(path))["metadata"]
            await write_scale(kube, ScaleWrite(path=path, uid=meta["uid"], generation=meta["generation"], after=number))
            return await kube.get(path)

        for number in (3, 0, 2):
            found = await write(number)
            assert found["spec"]["replicas"] == number
        stale = found["metadata"]
        await kube.patch(path, {"spec": {"autoscaling": None}})
        late = ScaleWrite(path=path, uid=stale["uid"], generation=stale["generation"], after=4)
        with pytest.raises(OperatorError, match="changed while the scaler decided"):
            await write_scale(kube, late)
        with pytest.raises(KubeError) as refused:
            await kube.scale(path, stale["resourceVersion"], 4, "rayloom-operator-scaler")
        assert refused.value.code == INVALID
        assert (await kube.get(path))["spec"]["replicas"] == 2

    with_kube(world, monkeypatch, work)
