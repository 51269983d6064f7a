"""Shortens the manifests of KubeRay's CRDs, because an API server needs seconds of CPU time for the full schemas. Pure.

KubeRay and the operator use only the version v1, and the operator only the kind RayCluster. Manifests are handled as
lines, because cluster-up runs without an installation, so without a YAML parser. controller-gen writes these lines:
each version is indented by two spaces, and its keys are indented by four.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_VERSIONS = "  versions:\n"
_SCHEMA = "    schema:\n"
_WITHOUT_FIELDS = (
    _SCHEMA,
    "      openAPIV3Schema:\n",
    "        type: object\n",
    "        x-kubernetes-preserve-unknown-fields: true\n",
)


def short_crd(manifest: str, *, has_fields: bool) -> str:
    """The manifest with only the version v1. Without `has_fields`, its schema allows any fields."""
    head, found, versions = manifest.partition(_VERSIONS)
    kept = [each for each in re.split(r"(?m)^(?=  - )", versions) if re.search(r"(?m)^(?:    |  - )name: v1$", each)]
    if not found or len(kept) != 1:
        raise ValueError(f"a CRD has {len(kept)} versions v1 instead of one:\n{head}")
    lines = kept[0].splitlines(keepends=True)
    return "".join((head, found, *(lines if has_fields else _without_fields(lines))))


def _without_fields(lines: list[str]) -> Iterator[str]:
    is_in_schema = False
    for line in lines:
        if line == _SCHEMA:
            is_in_schema = True
            yield from _WITHOUT_FIELDS
        elif not line.startswith("     "):
            is_in_schema = False
        if not is_in_schema:
            yield line
