"""Checks whether the operator can use the cluster's KubeRay, from the CustomResourceDefinition of RayClusters. Pure.

The API server silently drops fields that the definition lacks. With the definition of an old KubeRay, engine replicas
would fail in ways that nobody can explain.
"""

from __future__ import annotations

from rayloom_operator.names import Manifest

DEFINITION = "rayclusters.ray.io"
_CURE = "Install KubeRay 1.6 or newer, with its definitions (Helm does not update those)."
# The fields that the operator sets, and `secretName`, which KubeRay has since 1.6.
_FIELDS = (
    "rayVersion",
    "enableInTreeAutoscaling",
    "authOptions.mode",
    "authOptions.secretName",
    *(f"headGroupSpec.{name}" for name in ("rayStartParams", "template")),
    *(f"workerGroupSpecs.{name}" for name in ("groupName", "replicas", "rayStartParams", "template")),
)


def problem(definition: Manifest | None) -> str:
    """Returns why KubeRay cannot be used, and the cure; empty if KubeRay can be used.

    `definition` is None if the cluster has none.
    """
    if definition is None:
        return f"The cluster has no KubeRay: there is no CustomResourceDefinition {DEFINITION}. {_CURE}"
    if "deletionTimestamp" in definition["metadata"]:
        return f"KubeRay is being removed from the cluster: {DEFINITION} is terminating. {_CURE}"
    served = [each for each in definition["spec"]["versions"] if each["name"] == "v1" and each["served"]]
    schema = served[0].get("schema", {}).get("openAPIV3Schema", {}) if served else {}
    spec = schema.get("properties", {}).get("spec", {})
    missing = [field for field in _FIELDS if not _has(spec, field)]
    if not missing:
        return ""
    lack = f"has no spec.{missing[0]}" if served else "does not serve v1"
    return f"The cluster's KubeRay is too old: {DEFINITION} {lack}. {_CURE}"


def _has(schema: Manifest, field: str) -> bool:
    for name in field.split("."):
        schema = schema.get("items", schema).get("properties", {}).get(name)
        if schema is None:
            return False
    return True


def slim(definition: Manifest) -> Manifest:
    """Returns the part of a definition to keep: its name, and the result of `problem`. A definition has a megabyte."""
    return {"metadata": {"name": definition["metadata"]["name"]}, "problem": problem(definition)}
