"""Whether the KubeRay of the cluster can be used, from the definition of its RayCluster. Pure.

An API server drops fields that a definition does not know without a word, so an old one would make engines that fail
in strange ways.
"""

from __future__ import annotations

from rayloom_operator.names import Manifest

DEFINITION = "rayclusters.ray.io"
_CURE = "Install KubeRay 1.6 or newer, with its definitions (Helm does not update those)."
# What the operator sets, and `secretName`, which 1.6 brought.
_FIELDS = (
    "rayVersion",
    "enableInTreeAutoscaling",
    "authOptions.mode",
    "authOptions.secretName",
    *(f"headGroupSpec.{name}" for name in ("rayStartParams", "template")),
    *(f"workerGroupSpecs.{name}" for name in ("groupName", "replicas", "rayStartParams", "template")),
)


def problem(definition: Manifest | None) -> str:
    """Why it cannot be used, and what to do; empty when it can. None is a cluster without that definition."""
    if definition is None:
        return f"The cluster has no KubeRay: there is no CustomResourceDefinition {DEFINITION}. {_CURE}"
    if "deletionTimestamp" in definition["metadata"]:
        return f"KubeRay is being removed from the cluster: {DEFINITION} is on its way out. {_CURE}"
    served = [each for each in definition["spec"]["versions"] if each["name"] == "v1" and each["served"]]
    schema = served[0].get("schema", {}).get("openAPIV3Schema", {}) if served else {}
    spec = schema.get("properties", {}).get("spec", {})
    missing = [field for field in _FIELDS if not _has(spec, field)]
    if not missing:
        return ""
    what = f"has no spec.{missing[0]}" if served else "does not serve v1"
    return f"The cluster's KubeRay is too old: {DEFINITION} {what}. {_CURE}"


def _has(schema: Manifest, field: str) -> bool:
    for name in field.split("."):
        schema = schema.get("items", schema).get("properties", {}).get(name)
        if schema is None:
            return False
    return True


def slim(definition: Manifest) -> Manifest:
    """What is kept of a definition: a megabyte is a long way to a sentence."""
    return {"metadata": {"name": definition["metadata"]["name"]}, "problem": problem(definition)}
