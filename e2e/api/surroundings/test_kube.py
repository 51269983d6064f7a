"""An assumption of the operator: the API server refuses an apply whose uid is not the existing object's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from api.own_client import with_kube
from rayloom_operator.kube.client import Kube, KubeError, Recreated
from real_api_server.world import LLM, World

Make = Callable[..., dict[str, Any]]

_OTHER = "00000000-0000-0000-0000-000000000000"


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
        with pytest.raises(Recreated) as late:
            await write(kube, _OTHER, progress="third")
        assert late.value.found["metadata"]["uid"] == named["uid"]
        for field in ("progress", "unheardOf"):
            with pytest.raises(KubeError, match=rf"status\.{field}") as refused:
                await write(kube, named["uid"], **{field: {}})
            assert refused.value.code == 422

    with_kube(world, monkeypatch, work)
    path = f"{LLM}/namespaces/{namespace}/llmservices/{named['name']}"
    assert world.request("GET", path)["status"]["progress"] == "second"
    world.delete(path)

    async def write_late(kube: Kube) -> None:
        with pytest.raises(KubeError) as refused:
            await write(kube, named["uid"], progress="fourth")
        assert refused.value.code == 404

    with_kube(world, monkeypatch, write_late)


def test_an_apply_with_a_uid_changes_that_very_object_alone(
    world: World, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "mine", "namespace": namespace, "labels": {"a": "1"}},
    }
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/mine"

    def with_uid(uid: str, label: str) -> dict[str, Any]:
        return wanted | {"metadata": wanted["metadata"] | {"uid": uid, "labels": {"a": label}}}

    async def work(kube: Kube) -> None:
        made = await kube.apply(wanted)
        uid = made["metadata"]["uid"]
        # An apply of the same content with the object's uid changes nothing, not even the field managers.
        assert await kube.apply(with_uid(uid, "1")) == made
        assert (await kube.apply(with_uid(uid, "2")))["metadata"]["labels"] == {"a": "2"}
        for is_gone in (False, True):
            if is_gone:
                await kube.delete(path)
            with pytest.raises(KubeError) as refused:
                await kube.apply(with_uid(_OTHER, "3"))
            code, words = refused.value.code, str(refused.value)
            # From these errors the operator's applier concludes that the existing object is another one.
            assert code in (404, 409) or (code == 422 and "metadata.uid" in words), (code, words)
        with pytest.raises(KubeError):
            await kube.get(path)

    with_kube(world, monkeypatch, work)
