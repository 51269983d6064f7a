"""The volumes from which pods read LoRA adapters, and the adapters' paths in the pods.

Pods mount no volume for an adapter of the hub: they fetch its files. The path of such an adapter is
hf://ORG/NAME@COMMIT once the commit is known, so that every engine loads the same files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from rayloom_operator.api.adapters import Adapter, volume_sources
from rayloom_operator.api.model import Model
from rayloom_operator.api.pod_template.container import covers
from rayloom_operator.api.pod_template.reserved_parts import ADAPTER_VOLUMES, ADAPTERS_FOLDER
from rayloom_operator.names import CLAIM_FOLDER, Manifest


def adapter_places(model: Model) -> list[tuple[Manifest, Manifest]]:
    """Returns a volume and its mount for each claim and each node folder that contains adapters.

    A claim that also has the model is left out, because pods mount it for the model. Folders inside the folder of a
    file:// model are left out for the same reason.
    """
    return [
        ({"name": name, **volume}, {"mountPath": path, "readOnly": True})
        for name, (volume, path) in zip(ADAPTER_VOLUMES, _sources(model), strict=False)
    ]


def adapter_paths(model: Model, commits: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Returns name of an adapter -> its folder in the pods, or its place on the hub.

    `commits`: name -> commit of adapters of the hub.
    """
    return {each.name: _path(each, model, commits.get(each.name)) for each in model.adapters or ()}


def mountable(
    model: Model, mounted_for: Model, present: Mapping[str, str], commits: Mapping[str, str]
) -> dict[str, str]:
    """Returns name -> folder or place of the adapters of `model`, in pods built for the model `mounted_for`.

    The two models differ during a rollout that changes volumes. If the pods do not mount an adapter's new folder, the
    adapter keeps its folder in `present`, or else its folder in `mounted_for`. So requests find the adapter until the
    pods are replaced. A new adapter whose folder the pods do not mount is left out.
    """
    mounted = mounted_paths(model, mounted_for, commits)
    earlier = {**adapter_paths(mounted_for), **present}
    found = {each.name: mounted.get(each.name) or earlier.get(each.name) for each in model.adapters or ()}
    return {name: path for name, path in found.items() if path is not None}


def mounted_paths(
    model: Model, mounted_for: Model, commits: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Returns the `adapter_paths` of `model` that exist in pods built for the model `mounted_for`.

    The path of an adapter on the hub exists if the pods have access to the hub.
    """
    folders = [mount["mountPath"] for _, mount in adapter_places(mounted_for)]
    folders += [] if mounted_for.host_path is None else [mounted_for.host_path]
    own_claim = mounted_for.claim
    return {
        each.name: path
        for each, path in zip(model.adapters or (), adapter_paths(model, commits).values(), strict=True)
        if (each.is_on_hub and mounted_for.uses_hub)
        or any(covers(folder, path) for folder in folders)
        or (each.claim is not None and each.claim == own_claim == model.claim)
    }


def _sources(model: Model) -> Iterator[tuple[Manifest, str]]:
    for source in volume_sources(model.adapters or (), model.claim, model.host_path):
        if source.startswith("/"):
            yield {"hostPath": {"path": source, "type": "Directory"}}, source
        else:
            yield {"persistentVolumeClaim": {"claimName": source}}, f"{ADAPTERS_FOLDER}/{source}"


def _path(adapter: Adapter, model: Model, commit: str | None) -> str:
    if adapter.is_on_hub and commit is not None:
        return adapter.at(commit)
    if adapter.claim is None:
        return adapter.path
    folder = CLAIM_FOLDER if adapter.claim == model.claim else f"{ADAPTERS_FOLDER}/{adapter.claim}"
    return f"{folder}/{adapter.path}".rstrip("/")
