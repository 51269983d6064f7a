"""Writes the CustomResourceDefinitions into `crds/` and into the chart, with equal bytes: `make crds`.

A schema comes from the typed models. The API server accepts structural schemas only (https://kubernetes.io/docs/
tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema): no references, no
alternatives, no null, no closed maps. The API server prunes unknown fields. `kubectl` refuses manifests with unknown
fields before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rayloom_operator.api.llmgateway.spec import KIND as GATEWAY_KIND
from rayloom_operator.api.llmgateway.spec import GatewaySpec, LLMGateway
from rayloom_operator.api.llmgateway.stored import LLMGatewayStatus
from rayloom_operator.api.spec import KIND, LLMService, Spec
from rayloom_operator.api.status import Status
from rayloom_operator.names import API_GROUP as GROUP
from rayloom_operator.names import API_PLURAL as PLURAL
from rayloom_operator.names import API_VERSION_NAME as VERSION

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "crds", ROOT / "charts" / "rayloom-operator" / "files")

Schema = dict[str, Any]
Column = tuple[str, str, str, str]

# With this annotation, Helm keeps a definition when the release is uninstalled. Without it, Helm would delete the
# definition, and so every object of its kind.
_ANNOTATIONS = {"helm.sh/resource-policy": "keep"}
# Paths that `kubectl scale` and autoscalers read and write.
_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}
# Keywords of JSON schema that the API server ignores or refuses.
_DROPPED = frozenset({"$defs", "title", "additionalProperties", "const", "anyOf", "$ref", "default"})
_REASON = '.status.conditions[?(@.type=="Available")].reason'


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of objects that the operator reconciles."""

    name: str
    plural: str
    short_names: tuple[str, ...]
    description: str
    document: type[BaseModel]
    spec: type[BaseModel]
    spec_description: str
    status: type[BaseModel]
    columns: tuple[Column, ...]
    wide_columns: tuple[Column, ...] = ()  # columns that only `kubectl get -o wide` shows
    is_scaled: bool = False  # `kubectl scale` changes spec.replicas

    @property
    def file_name(self) -> str:
        return f"{self.plural}.{GROUP}.yaml"


SERVICES = Kind(
    name=KIND,
    plural=PLURAL,
    short_names=("llm", "llms"),
    description="A large language model, served by engines on Ray.",
    document=LLMService,
    spec=Spec,
    spec_description="The model to serve, and how.",
    status=Status,
    columns=(
        ("Model", "string", ".spec.model.source", "Source of the model."),
        ("Shape", "string", ".status.shape", "Tensor and pipeline parallelism."),
        ("Ready", "string", ".status.ready", "Engines that serve, of the desired number."),
        ("Reason", "string", _REASON, "Reason of the condition Available."),
        ("Loading", "string", ".status.loading", "Progress of a starting engine, such as 41 of 131 GB."),
        ("Rollout", "string", ".status.progress", "Phase or result of the last rollout."),
        ("URL", "string", ".status.endpoint", "URL of the API inside the cluster."),
        ("Age", "date", ".metadata.creationTimestamp", "Time since it was created."),
    ),
    wide_columns=(("Scaling", "string", ".status.autoscaling.reason", "Cause of the number of engines."),),
    is_scaled=True,
)
GATEWAYS = Kind(
    name=GATEWAY_KIND,
    plural=f"{GATEWAY_KIND.lower()}s",
    short_names=("llmgw",),
    description="One URL for several LLMServices of a namespace.",
    document=LLMGateway,
    spec=GatewaySpec,
    spec_description="The services, and the pods in front of them.",
    status=LLMGatewayStatus,
    columns=(
        ("Models", "string", ".status.serving", "Selected services that serve, of all."),
        ("Ready", "string", ".status.ready", "Gateway pods that take requests, of the desired number."),
        ("Reason", "string", _REASON, "Reason of the condition Available."),
        ("Degraded", "string", '.status.conditions[?(@.type=="Degraded")].reason', "Reason of the condition Degraded."),
        ("URL", "string", ".status.endpoint", "URL of the API inside the cluster."),
        ("Age", "date", ".metadata.creationTimestamp", "Time since it was created."),
    ),
)
KINDS = (SERVICES, GATEWAYS)


def custom_resource_definition(kind: Kind) -> Schema:
    """The complete object, ready to apply."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}", "annotations": _ANNOTATIONS},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": list(kind.short_names),
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}} | ({"scale": _SCALE} if kind.is_scaled else {}),
                    "additionalPrinterColumns": [
                        *map(_column, kind.columns),
                        *(_column(each) | {"priority": 1} for each in kind.wide_columns),
                    ],
                    "schema": {"openAPIV3Schema": _root_schema(kind)},
                }
            ],
        },
    }


def crd_text(kind: Kind) -> str:
    """The definition as YAML, with the file's header."""
    head = "# Made by `make crds` from the typed models of the operator. Change those, not this file.\n"
    # yaml.safe_dump writes the same bytes, and needs a second for a definition.
    definition = custom_resource_definition(kind)
    return head + yaml.dump(definition, Dumper=yaml.CSafeDumper, sort_keys=False, width=120, allow_unicode=True)


def _column(column: Column) -> Schema:
    name, kind, path, description = column
    return {"name": name, "type": kind, "jsonPath": path, "description": description}


def _root_schema(kind: Kind) -> Schema:
    return {
        "type": "object",
        "description": kind.description,
        "required": ["spec"],
        "x-kubernetes-validations": kind.document.model_json_schema()["x-kubernetes-validations"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(kind.spec) | {"description": kind.spec_description},
            "status": structural_schema(kind.status) | {"description": "The observed state, written by the operator."},
        },
    }


def structural_schema(model: type[BaseModel]) -> Schema:
    """The model's schema in the form that the API server accepts."""
    document = model.model_json_schema(by_alias=True)
    return _structural(document, document.get("$defs", {}))


def _structural(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """`schema` as a structural schema: references are resolved, `X or null` is X, and other keywords are removed."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix("#/$defs/")]
        return _structural(target | {key: value for key, value in schema.items() if key != "$ref"}, definitions)
    if "anyOf" in schema:
        # A structural schema has no null. A field that may be null is optional instead: `required` does not name it.
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
        for kind in KINDS:
            path = folder / kind.file_name
            path.write_text(crd_text(kind), encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
