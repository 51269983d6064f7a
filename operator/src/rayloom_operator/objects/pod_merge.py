"""Strategic merge of one pod template over another, by Kubernetes' own rules. Pure; the inputs are untouched.

    map with map              field by field
    list with a merge key     element by element, those with equal keys merged; new ones come last, in their order
    list of a set             what is not in it yet comes last
    anything else             the second one replaces the first

https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/#notes-on-the-strategic-merge-patch
has the keys; topologySpreadConstraints have those of server-side apply. Nothing is ever deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayloom_operator.names import Manifest

# By which fields the elements of a list are the same.
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
# Elements that are one of several kinds: two kinds in one would be refused, so the second element replaces the first.
_WHOLE = frozenset({"env", "volumes"})
_SETS = frozenset({"envFrom", "tolerations"})


def merged(base: Manifest, patch: Manifest) -> Manifest:
    """`base` with all that is in `patch`. Merging nothing, or the same again, changes nothing."""
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
