"""The manifests of KubeRay's kinds that the local clusters get."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from local_kubernetes.components.short_crd import short_crd


def _version(name: str, **more: Any) -> dict[str, Any]:
    columns = [{"jsonPath": ".status.state", "name": "status", "type": "string"}]
    fields = {"type": "object", "properties": {"spec": {"type": "object", "description": f"of\n  - name: {name}"}}}
    return {
        "additionalPrinterColumns": columns,
        "name": name,
        "schema": {"openAPIV3Schema": fields},
        "served": True,
        "storage": name == "v1",
        "subresources": {"status": {}},
    } | more


def _manifest(*versions: dict[str, Any]) -> dict[str, Any]:
    names = {"kind": "RayThing", "plural": "raythings"}
    return {"kind": "CustomResourceDefinition", "spec": {"names": names, "versions": list(versions)}}


def test_the_version_v1_is_kept_as_it_is() -> None:
    v1 = _version("v1")
    for versions in ((v1, _version("v1alpha1")), (_version("v1alpha1"), v1), (v1,)):
        assert yaml.safe_load(short_crd(yaml.dump(_manifest(*versions)), has_fields=True)) == _manifest(v1)


def test_a_kind_without_fields_keeps_all_but_its_schema() -> None:
    found = short_crd(yaml.dump(_manifest(_version("v1"), _version("v1alpha1"))), has_fields=False)
    any_fields = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    assert yaml.safe_load(found) == _manifest(_version("v1", schema=any_fields))


@pytest.mark.parametrize("versions", [(), ("v1alpha1",), ("v2",)])
def test_another_layout_is_an_error(versions: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="0 versions v1"):
        short_crd(yaml.dump(_manifest(*map(_version, versions))), has_fields=True)
