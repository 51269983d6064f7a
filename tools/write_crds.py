"""Writes the CustomResourceDefinition into `crds/` and into the chart, with equal bytes: `make crds`.

Its schema comes from the typed models. The API server accepts structural schemas only (https://kubernetes.io/docs/
tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema): no references, no
alternatives, no null, no closed maps. The API server prunes unknown fields; `kubectl` refuses them before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rayloom_operator.api.spec import KIND, LLMService, Spec
from rayloom_operator.api.status import Status
from rayloom_operator.names import API_GROUP as GROUP
from rayloom_operator.names import API_PLURAL as PLURAL
from rayloom_operator.names import API_VERSION_NAME as VERSION

ROOT = Path(__file__).resolve().parent.parent
FILE_NAME = f"{PLURAL}.{GROUP}.yaml"
FOLDERS = (ROOT / "crds", ROOT / "charts" / "rayloom-operator" / "files")

Schema = dict[str, Any]

_COLUMNS = (
    ("Model", "string", ".spec.model.source", "Source of the model."),
    ("Shape", "string", ".status.shape", "Tensor and pipeline parallelism."),
    ("Ready", "string", ".status.ready", "Engines that serve, of the desired number."),
    ("Reason", "string", '.status.conditions[?(@.type=="Available")].reason', "Reason of the condition Available."),
    ("Loading", "string", ".status.loading", "Progress of a starting engine, such as 41 of 131 GB."),
    ("Rollout", "string", ".status.progress", "Phase or result of the last rollout."),
    ("URL", "string", ".status.endpoint", "URL of the API inside the cluster."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since it was created."),
)
# Columns that only `kubectl get -o wide` shows.
_WIDE_COLUMNS = (("Scaling", "string", ".status.autoscaling.reason", "Cause of the number of engines."),)
# Helm keeps the definition when the release is uninstalled, since deleting it would delete every LLMService.
_ANNOTATIONS = {"helm.sh/resource-policy": "keep"}
# Paths that `kubectl scale` and autoscalers read and write.
_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}
# Keywords of JSON schema that the API server ignores or refuses.
_DROPPED = frozenset({"$defs", "title", "additionalProperties", "const", "anyOf", "$ref", "default"})


def custom_resource_definition() -> Schema:
    """The complete object, ready to apply."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "annotations": _ANNOTATIONS},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["llm", "llms"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}, "scale": _SCALE},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "description": description}
                        for name, kind, path, description in _COLUMNS
                    ]
                    + [
                        {"name": name, "type": kind, "jsonPath": path, "description": description, "priority": 1}
                        for name, kind, path, description in _WIDE_COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": _root_schema()},
                }
            ],
        },
    }


def crd_text() -> str:
    """The definition as YAML, with the file's header."""
    head = "# Made by `make crds` from the typed models of the operator. Change those, not this file.\n"
    return head + yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=120, allow_unicode=True)


def _root_schema() -> Schema:
    rules = LLMService.model_json_schema()["x-kubernetes-validations"]
    return {
        "type": "object",
        "description": "A large language model, served by engines on Ray.",
        "required": ["spec"],
        "x-kubernetes-validations": rules,
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(Spec) | {"description": "The model to serve, and how."},
            "status": structural_schema(Status) | {"description": "The observed state, written by the operator."},
        },
    }


def structural_schema(model: type[BaseModel]) -> Schema:
    """The model's schema in the form that the API server accepts."""
    document = model.model_json_schema(by_alias=True)
    return _structural(document, document.get("$defs", {}))


def _structural(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """`schema` with references resolved, `X or null` as X, and only words of structural schemas."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix("#/$defs/")]
        return _structural(target | {key: value for key, value in schema.items() if key != "$ref"}, definitions)
    if "anyOf" in schema:
        # A field that may be absent: in a structural schema only `required` expresses that.
        (only,) = (option for option in schema["anyOf"] if option != {"type": "null"})
        return _structural(only | {key: value for key, value in schema.items() if key != "anyOf"}, definitions)
    result = {key: value for key, value in schema.items() if key not in _DROPPED}
    if "const" in schema:
        result["enum"] = [schema["const"]]
    if schema.get("default") is not None:
        result["default"] = schema["default"]
    if schema.get("additionalProperties") is True:
        result["x-kubernetes-preserve-unknown-fields"] = True
    if schema["type"] == "integer":
        result["format"] = "int64"
    elif schema["type"] == "array":
        result["items"] = _structural(schema["items"], definitions)
    elif "properties" in schema:
        result["properties"] = {name: _structural(part, definitions) for name, part in schema["properties"].items()}
    elif isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = _structural(schema["additionalProperties"], definitions)
    return result


def main() -> None:
    for folder in FOLDERS:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(crd_text(), encoding="utf-8")
        print(f"wrote {(folder / FILE_NAME).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
