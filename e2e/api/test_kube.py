"""What the operator counts on when it writes: the API server itself looks whose object it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rayloom_operator.kube import Kube, KubeError, MadeAnew
from standins.world import LLM, World

Make = Callable[..., dict[str, Any]]

_OTHER = "00000000-0000-0000-0000-000000000000"


def _run(world: World, monkeypatch: pytest.MonkeyPatch, work: Callable[[Kube], Awaitable[None]]) -> None:
    monkeypatch.setenv("KUBECONFIG", str(world.kubeconfig))

    async def run() -> None:
        kube = Kube()
        try:
            await work(kube)
        finally:
            await kube.close()

    asyncio.run(run())


def test_a_service_gets_no_status_of_another_one_of_its_name(
    world: World, namespace: str, manifest: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stop_operators()
    made = world.create(manifest())
    named = {each: made["metadata"][each] for each in ("name", "namespace", "uid")}

    async def write(kube: Kube, uid: str, **status: object) -> dict[str, Any]:
        return await kube.replace_status(
            {
                "apiVersion": made["apiVersion"],
                "kind": made["kind"],
                "metadata": named | {"uid": uid},
                "status": status,
            }
        )

    async def work(kube: Kube) -> None:
        for progress in ("first", "second"):
            assert (await write(kube, named["uid"], progress=progress))["status"]["progress"] == progress
        with pytest.raises(MadeAnew) as late:
            await write(kube, _OTHER, progress="third")
        assert late.value.found["metadata"]["uid"] == named["uid"]
        for field in ("progress", "unheardOf"):
            with pytest.raises(KubeError, match=rf"status\.{field}") as refused:
                await write(kube, named["uid"], **{field: {}})
            assert refused.value.code == 422

    _run(world, monkeypatch, work)
    path = f"{LLM}/namespaces/{namespace}/llmservices/{named['name']}"
    assert world.request("GET", path)["status"]["progress"] == "second"
    world.delete(path)

    async def write_late(kube: Kube) -> None:
        with pytest.raises(KubeError) as refused:
            await write(kube, named["uid"], progress="fourth")
        assert refused.value.code == 404

    _run(world, monkeypatch, write_late)
