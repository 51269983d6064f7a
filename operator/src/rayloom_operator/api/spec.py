"""The spec of LLMService v1alpha1. The CRD's schema is generated from these classes. Every field has an effect.

Attributes are in snake_case, documents in camelCase (`served_name` is `servedName`). Numbers have their unit in the
name or in the description. `parse` reads every document, checks all fields and names each invalid field. A check that
the API server can do itself is also a CEL rule beside the field. So `kubectl apply` fails with the same message.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from rayloom_operator.api.adapters import (
    HUB_ONLY_IN_WORDS,
    MODELS_FOLDER,
    MODELS_IN_WORDS,
    ON_CPU_IN_WORDS,
    OTHER_NAME_IN_WORDS,
    Adapters,
    adapter_folders,
)
from rayloom_operator.api.autoscaling.spec import MAX_REPLICAS, NO_GATEWAY_IN_WORDS, Autoscaling
from rayloom_operator.api.base import Part
from rayloom_operator.api.base import rules as _rules
from rayloom_operator.api.engine import Engine
from rayloom_operator.api.gateway.spec import Gateway
from rayloom_operator.api.pod_template.reserved_parts import ADAPTER_VOLUMES
from rayloom_operator.api.pod_template.template import (
    ADAPTER_VOLUMES_IN_WORDS,
    HEAD_ACCELERATORS_IN_WORDS,
    PodTemplates,
)
from rayloom_operator.api.pods import Auth, ModelCache, Scheduling, SecretKey
from rayloom_operator.api.problems import explain, source_hint
from rayloom_operator.api.recovery import Recovery
from rayloom_operator.api.restart import RestartTime
from rayloom_operator.api.rollout.spec import Rollout
from rayloom_operator.api.sizing import Accelerator, Parallelism, Sizing
from rayloom_operator.errors import SpecError

API_VERSION = "rayloom.dev/v1alpha1"
KIND = "LLMService"
BUILTIN_MODELS = ("smollm2-135m",)

# RayClusters are named `<service>-<revision>-<n>`. KubeRay allows 53 characters: 40 + 1 + 8 + 1 + 3.
_MAX_NAME = 40

_SOURCES = (
    r"hf://[\w.-]+/[\w.-]+",
    r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[\w.-]+)*/?",
    r"file:///.+",
    "builtin://(" + "|".join(BUILTIN_MODELS) + ")",
)
_SOURCES_IN_WORDS = "hf://ORG/NAME, pvc://CLAIM/PATH, file:///PATH, " + ", ".join(
    f"builtin://{name}" for name in BUILTIN_MODELS
)

_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_RULE = (
    f"size(self.metadata.name) <= {_MAX_NAME} && self.metadata.name.matches({json.dumps(_NAME_PATTERN)})",
    f"metadata.name: use at most {_MAX_NAME} lower-case letters, digits and '-', beginning with a letter",
)
_ADAPTER_NAMES_RULE = (
    "!has(self.spec) || !has(self.spec.model) || !has(self.spec.model.adapters) || self.spec.model.adapters.all(each, "
    "each.name != (has(self.spec.model.servedName) ? self.spec.model.servedName : self.metadata.name))",
    OTHER_NAME_IN_WORDS,
)
_REPLICAS_IN_WORDS = f"use 0 to {MAX_REPLICAS} replicas; 0 suspends the service"


def _is_a_number_of_replicas(number: int) -> int:
    if not 0 <= number <= MAX_REPLICAS:
        raise ValueError(f"{number} is not possible: {_REPLICAS_IN_WORDS}")
    return number


class Metadata(Part):
    name: str = Field(
        pattern=_NAME_PATTERN,
        max_length=_MAX_NAME,
        description="Name of the service: lower-case letters, digits and '-', at most 40 characters.",
    )
    namespace: str = Field("default", min_length=1, description="Kubernetes namespace. No effect without a cluster.")
    uid: str = Field("", description="Set by the API server; empty without a cluster.")
    generation: int = Field(0, description="Counted by the API server; 0 without a cluster.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels. No effect without a cluster.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations. No effect without a cluster.")


class Model(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "!has(self.revision) || self.source.startsWith('hf://')",
                "revision has an effect for hf:// sources only: remove it, or use an hf:// source",
            ),
            (
                "(!has(self.tokenSecretRef) && !has(self.cache)) || self.source.startsWith('hf://') || "
                "(has(self.adapters) && self.adapters.exists(each, each.source.startsWith('hf://')))",
                HUB_ONLY_IN_WORDS,
            ),
            (
                "!has(self.adapters) || !self.source.startsWith('pvc://') || "
                f"self.adapters.all(each, !each.source.startsWith('file://{MODELS_FOLDER}/'))",
                MODELS_IN_WORDS,
            ),
        )
    )

    source: str = Field(
        max_length=1024,
        description=f"Source of the model: {_SOURCES_IN_WORDS}. pvc:// is a folder or .gguf file in a "
        "PersistentVolumeClaim of the service's namespace; file:// is a path on the cluster's nodes.",
        json_schema_extra=_rules(
            (
                f"self.matches({json.dumps('^(' + '|'.join(_SOURCES) + ')$')})",
                f"this is not a model source; use one of {_SOURCES_IN_WORDS}",
            )
        ),
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="Branch, tag or commit on the hub; only for hf://. A branch is resolved to its commit once, when "
        "this service is first inspected. Default: main.",
    )
    token_secret_ref: SecretKey | None = Field(
        None, description="The hub's access token, for private and gated models and adapters; only for hf://."
    )
    cache: ModelCache | None = Field(
        None,
        description="Volume in which pods keep files of the hub, so that each file is downloaded once; only for "
        "hf://. Default: each pod downloads for itself.",
    )
    served_name: str | None = Field(
        None, min_length=1, description="Name that clients put into `model`. Default: metadata.name."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of the weights; auto: the checkpoint's. CPUs without this type compute in float32."
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt + output in tokens. Default: the limit of the model's config; if memory is too "
        "small for that, the longest that fits.",
    )
    adapters: Adapters | None = Field(
        None,
        description="LoRA adapters, each under a name of its own beside the model; only on CPU. Engines load and "
        "unload them while they serve. An empty list keeps memory for adapters that come later.",
    )

    @field_validator("source")
    @classmethod
    def _source_is_known(cls, source: str) -> str:
        if not any(re.fullmatch(pattern, source) for pattern in _SOURCES):
            hint = source_hint(source, BUILTIN_MODELS)
            raise ValueError(f"{source!r} is not a model source; use one of {_SOURCES_IN_WORDS}{hint}")
        return source

    @model_validator(mode="after")
    def _revision_has_an_effect(self) -> Model:
        if self.revision is not None and self.source_kind != "hf":
            raise ValueError(
                f"revision {self.revision!r} has no effect for {self.source!r}; remove it, or use an hf:// source"
            )
        if (self.token_secret_ref or self.cache) and not self.uses_hub:
            raise ValueError(HUB_ONLY_IN_WORDS)
        return self

    @model_validator(mode="after")
    def _adapters_are_beside_the_claim(self) -> Model:
        in_claim = [each.name for each in self.adapters or () if each.path.startswith(f"{MODELS_FOLDER}/")]
        if self.claim is not None and in_claim:
            raise ValueError(f"adapters: {', '.join(in_claim)}: {MODELS_IN_WORDS}")
        return self

    @property
    def source_kind(self) -> str:
        """The part of `source` before `://`: hf, pvc, file or builtin."""
        return self.source.split("://", 1)[0]

    @property
    def uses_hub(self) -> bool:
        """True if pods fetch the model or an adapter from the Hugging Face hub."""
        return self.source_kind == "hf" or any(each.is_on_hub for each in self.adapters or ())

    @property
    def claim(self) -> str | None:
        """Name of the PersistentVolumeClaim with the model; None if the model is not in a claim."""
        return self.source.removeprefix("pvc://").partition("/")[0] if self.source_kind == "pvc" else None

    @property
    def host_path(self) -> str | None:
        """Path of a file:// model on the nodes, at which pods mount it; None for another source."""
        return self.source.removeprefix("file://").rstrip("/") if self.source_kind == "file" else None

    @property
    def is_gguf(self) -> bool:
        """True if `source` is a GGUF file. Then each pod converts the file for itself."""
        return self.source_kind in ("pvc", "file") and self.source.rstrip("/").endswith(".gguf")


_TENSOR_IN_WORDS = "the ranks of a stage share a node: lower parallelism.tensor, or raise accelerator.perNode"
_HEAD = "self.podTemplate.head.spec.containers"
_CPU_IN_WORDS = "engine.args.device cpu has no use for an accelerator: remove one of the two"
_INT8_IN_WORDS = "engine.args.quantization int8 works on CPU only: remove it, or the accelerator"


class Spec(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "!has(self.accelerator) || !has(self.parallelism) || !has(self.parallelism.tensor) || "
                "self.parallelism.tensor <= self.accelerator.perNode",
                _TENSOR_IN_WORDS,
            ),
            (
                "!has(self.accelerator) || !has(self.engine) || !has(self.engine.args) || "
                "!has(self.engine.args.device) || self.engine.args.device != 'cpu'",
                _CPU_IN_WORDS,
            ),
            (
                "!has(self.accelerator) || !has(self.engine) || !has(self.engine.args) || "
                "!has(self.engine.args.quantization) || self.engine.args.quantization != 'int8'",
                _INT8_IN_WORDS,
            ),
            (
                "!has(self.accelerator) || !has(self.podTemplate) || !has(self.podTemplate.head) || "
                f"!has(self.podTemplate.head.spec) || !has({_HEAD}) || {_HEAD}.all(each, !has(each.resources) || "
                "((!has(each.resources.requests) || !(self.accelerator.resource in each.resources.requests)) && "
                "(!has(each.resources.limits) || !(self.accelerator.resource in each.resources.limits))))",
                HEAD_ACCELERATORS_IN_WORDS,
            ),
            (
                "!has(self.model.adapters) || (!has(self.accelerator) && (!has(self.engine) || "
                "!has(self.engine.args) || !has(self.engine.args.device) || self.engine.args.device != 'cuda'))",
                ON_CPU_IN_WORDS,
            ),
            *(
                (
                    f"!has(self.model.adapters) || !has(self.podTemplate) || !has(self.podTemplate.{pod}) || "
                    f"!has(self.podTemplate.{pod}.spec) || !has(self.podTemplate.{pod}.spec.volumes) || "
                    f"self.podTemplate.{pod}.spec.volumes.all(each, !(each.name in {json.dumps(ADAPTER_VOLUMES)}))",
                    ADAPTER_VOLUMES_IN_WORDS,
                )
                for pod in ("head", "worker")
            ),
            (
                "!has(self.autoscaling) || self.autoscaling.minReplicas > 0 || has(self.gateway)",
                NO_GATEWAY_IN_WORDS,
            ),
        )
    )

    model: Model = Field(description="The model to serve.")
    parallelism: Parallelism = Field(
        default_factory=Parallelism,
        description="Numbers of ranks that share one replica. The operator computes a number that is left out, so that "
        "the model fits on the fewest accelerators.",
    )
    sizing: Sizing = Field(default_factory=Sizing, description="Room for requests that each engine must have.")
    accelerator: Accelerator | None = Field(None, description="The device of each rank. Left out: a CPU.")
    replicas: Annotated[int, AfterValidator(_is_a_number_of_replicas)] = Field(
        1,
        description=f"Number of engines, each with all ranks of the model; 0 to {MAX_REPLICAS}. 0 suspends the "
        "service: its engines finish their requests and are deleted. A change restarts no engine.",
        json_schema_extra=_rules((f"self >= 0 && self <= {MAX_REPLICAS}", _REPLICAS_IN_WORDS)),
    )
    autoscaling: Autoscaling | None = Field(
        None,
        description="The operator sets `replicas` by the load of the engines. Left out: `replicas` changes only when a "
        "user or another autoscaler writes it. A change restarts no engine.",
    )
    gateway: Gateway | None = Field(
        None,
        description="Pods to which clients connect, so that no stream ends with an engine. Left out: clients reach the "
        "engines directly. Adding or removing this part restarts the engines once. No effect without a cluster.",
    )
    drain_seconds: int = Field(
        30,
        ge=0,
        le=86400,
        description="Seconds for which a terminating engine may finish its running requests. A change restarts no "
        "engine: when the operator replaces or deletes an engine, it uses the new value at once. If somebody else "
        "evicts or deletes a running pod, the value with which the pod was created applies.",
    )
    restarted_at: RestartTime | None = Field(
        None,
        description="A time in RFC 3339, such as 2026-11-24T08:00:00Z. A change of this field starts a rollout that "
        "replaces every engine. The field has no other effect, so any time is allowed.",
    )
    rollout: Rollout = Field(
        default_factory=Rollout, description="Rules by which a change of the spec replaces running engines."
    )
    recovery: Recovery = Field(
        default_factory=Recovery, description="Times and limits for the replacement of failed ranks, engines and pods."
    )
    engine: Engine = Field(
        default_factory=Engine, description="Image, resources, environment and settings of the engine."
    )
    auth: Auth | None = Field(None, description="API keys. Default: every client that reaches the API may use it.")
    scheduling: Scheduling = Field(
        default_factory=Scheduling, description="Node labels, tolerations and priority of the pods."
    )
    pod_template: PodTemplates = Field(
        default_factory=PodTemplates,
        description="Additions to the pods, and changes of the pods, as parts of PodTemplateSpecs.",
    )

    @model_validator(mode="after")
    def _pods_can_be_built(self) -> Spec:
        adapters = self.model.adapters
        paths = [] if self.model.host_path is None else [self.model.host_path]
        paths += [] if adapters is None else adapter_folders(adapters)
        resource = self.accelerator.resource if self.accelerator is not None else None
        has_adapters = adapters is not None
        if problems := self.pod_template.problems(accelerator=resource, model_paths=paths, has_adapters=has_adapters):
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _requests_can_be_held(self) -> Spec:
        needs_gateway = self.autoscaling is not None and self.autoscaling.min_replicas == 0
        if needs_gateway and self.gateway is None:
            raise ValueError(NO_GATEWAY_IN_WORDS)
        return self

    @model_validator(mode="after")
    def _accelerator_is_used(self) -> Spec:
        if self.model.adapters is not None and (self.accelerator or self.engine.args.device == "cuda"):
            raise ValueError(ON_CPU_IN_WORDS)
        if self.accelerator is None:
            return self
        if (tensor := self.parallelism.tensor or 1) > self.accelerator.per_node:
            raise ValueError(f"tensor {tensor} is more than perNode {self.accelerator.per_node}; {_TENSOR_IN_WORDS}")
        if self.engine.args.device == "cpu":
            raise ValueError(_CPU_IN_WORDS)
        if self.engine.args.quantization == "int8":
            raise ValueError(_INT8_IN_WORDS)
        return self


class LLMService(Part):
    """A model and how to serve it."""

    model_config = ConfigDict(json_schema_extra=_rules(NAME_RULE, _ADAPTER_NAMES_RULE))

    api_version: Literal["rayloom.dev/v1alpha1"] = Field(description="Version of this document's schema.")
    kind: Literal["LLMService"] = Field(description="Kind of this document.")
    metadata: Metadata = Field(description="Name and labels.")
    spec: Spec = Field(description="The model and how to serve it.")

    @model_validator(mode="after")
    def _names_differ(self) -> LLMService:
        if any(each.name == self.served_name for each in self.spec.model.adapters or ()):
            raise ValueError(f"spec.model.adapters: {self.served_name}: {OTHER_NAME_IN_WORDS}")
        return self

    @property
    def served_name(self) -> str:
        """The name that clients put into `model`."""
        return self.spec.model.served_name or self.metadata.name


def parse(document: object) -> LLMService:
    """Reads the LLMService in a decoded YAML document. `document` is not changed.

    Raises SpecError with one line for each invalid field.
    """
    try:
        return LLMService.model_validate(without_server_fields(document))
    except ValidationError as error:
        raise SpecError(explain(error, LLMService)) from error


def without_spec(document: dict[str, object]) -> LLMService | None:
    """Returns the LLMService in `document` with a minimal spec instead of its own; None if its metadata is invalid."""
    try:
        return parse({**document, "spec": {"model": {"source": "builtin://smollm2-135m"}}})
    except SpecError:
        return None


def without_server_fields(document: object) -> object:
    """Returns the document without its status, and without metadata that only an API server writes."""
    if not isinstance(document, dict):
        return document
    kept = {key: value for key, value in document.items() if key != "status"}
    meta = kept.get("metadata")
    # Metadata from an API server is valid. Such metadata has more fields than `Metadata`, and later servers may add
    # others. So fields that `Metadata` lacks are dropped, and not refused as unknown.
    if isinstance(meta, dict) and {"uid", "creationTimestamp"} & meta.keys():
        kept["metadata"] = {key: value for key, value in meta.items() if key in Metadata.model_fields}
    return kept
