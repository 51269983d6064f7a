"""Merges one pod template over another by Kubernetes' strategic merge rules. Pure; the inputs stay unchanged.

    map with map              field by field
    list with a merge key     elements with equal keys are merged; new elements are appended in their order
    list that is a set        elements that are not in the list yet are appended
    any other value           the patch replaces the base

https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/#notes-on-the-strategic-merge-patch
lists the merge keys; those of topologySpreadConstraints are from server-side apply. The merge deletes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayloom_operator.names import Manifest

# Merge keys: elements of a list with equal values of these fields are the same element.
_KEYS: dict[str, tuple[str, ...]] = {
    "claims": ("name",),
    "containers": ("name",),
    "env": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
# In these lists the patch's element replaces the base's element as a whole. An element has exactly one kind (such as
# `value` or `valueFrom`), and Kubernetes would refuse an element that is a merge of two kinds.
_WHOLE = frozenset({"env", "volumes"})
_SETS = frozenset({"envFrom", "tolerations"})


def merged(base: Manifest, patch: Manifest) -> Manifest:
    """Returns `base` with `patch` merged over it. Merging the same patch again changes nothing."""
    found = dict(base)
    for name, value in patch.items():
        found[name] = _merged_value(name, found[name], value) if name in found else value
    return found


def _merged_value(name: str, base: Any, patch: Any) -> Any:
    if isinstance(base, dict) and isinstance(patch, dict):
        return merged(base, patch)
    if not isinstance(base, list) or not isinstance(patch, list):
        return patch
    if name in _SETS:
        return [*base, *(each for each in patch if each not in base)]
    if name in _KEYS:
        return _merged_by_key(base, patch, _KEYS[name], is_whole=name in _WHOLE)
    return patch


def _merged_by_key(
    base: Sequence[Manifest], patch: Sequence[Manifest], fields: tuple[str, ...], *, is_whole: bool
) -> list[Manifest]:
    found = {_key(each, fields): each for each in base}
    for each in patch:
        key = _key(each, fields)
        found[key] = merged(found[key], each) if key in found and not is_whole else each
    return list(found.values())


def _key(element: Manifest, fields: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(element.get(field) for field in fields)
