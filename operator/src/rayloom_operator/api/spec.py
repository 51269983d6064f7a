"""The spec of LLMService v1alpha1. The CRD's schema is generated from these classes. Every field has an effect.

Attributes are in snake_case, documents in camelCase (`served_name` is `servedName`). Numbers have their unit in the
name or in the description. `parse` reads every document, checks all fields and names each invalid field. A check that
the API server can do itself is also a CEL rule beside the field. So `kubectl apply` fails with the same message.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from rayloom_operator.api.adapters import ON_CPU_IN_WORDS, OTHER_NAME_IN_WORDS, adapter_folders, claims
from rayloom_operator.api.autoscaling.spec import MAX_REPLICAS, NO_GATEWAY_IN_WORDS, Autoscaling
from rayloom_operator.api.base import Part
from rayloom_operator.api.base import rules as _rules
from rayloom_operator.api.draft import NO_DRAFT_IN_WORDS, SPECULATION_IN_WORDS
from rayloom_operator.api.engine import Engine
from rayloom_operator.api.gateway.keys import KEYS_RULES, keys_problem
from rayloom_operator.api.gateway.spec import Gateway
from rayloom_operator.api.int8 import OF_DRAFT, OF_MODEL, ON_CPU_RULE, int8_problem, int8_rules
from rayloom_operator.api.model import Model
from rayloom_operator.api.pod_template.reserved_parts import (
    ADAPTER_VOLUMES,
    ADAPTERS_FOLDER,
    DRAFT_FOLDER,
    DRAFT_VOLUME,
)
from rayloom_operator.api.pod_template.template import (
    ADAPTER_VOLUMES_IN_WORDS,
    DRAFT_VOLUME_IN_WORDS,
    HEAD_ACCELERATORS_IN_WORDS,
    PodTemplates,
)
from rayloom_operator.api.pods import Auth, Scheduling
from rayloom_operator.api.problems import explain
from rayloom_operator.api.recovery import Recovery
from rayloom_operator.api.restart import RestartTime
from rayloom_operator.api.rollout.spec import Rollout
from rayloom_operator.api.sizing import Accelerator, Parallelism, Sizing
from rayloom_operator.errors import SpecError

API_VERSION = "rayloom.dev/v1alpha1"
KIND = "LLMService"

# RayClusters are named `<service>-<revision>-<n>`. KubeRay allows 53 characters: 40 + 1 + 8 + 1 + 3.
_MAX_NAME = 40

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


_TENSOR_IN_WORDS = "the ranks of a stage share a node: lower parallelism.tensor, or raise accelerator.perNode"
_HEAD = "self.podTemplate.head.spec.containers"
_CPU_IN_WORDS = "engine.args.device cpu has no use for an accelerator: remove one of the two"


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
            *int8_rules(),
            (
                "!has(self.accelerator) || !has(self.podTemplate) || !has(self.podTemplate.head) || "
                f"!has(self.podTemplate.head.spec) || !has({_HEAD}) || {_HEAD}.all(each, !has(each.resources) || "
                "((!has(each.resources.requests) || !(self.accelerator.resource in each.resources.requests)) && "
                "(!has(each.resources.limits) || !(self.accelerator.resource in each.resources.limits))))",
                HEAD_ACCELERATORS_IN_WORDS,
            ),
            (f"!has(self.model.adapters) || {ON_CPU_RULE}", ON_CPU_IN_WORDS),
            (
                "!has(self.model.draft) || !has(self.engine) || !has(self.engine.args) || "
                "!has(self.engine.args.speculation) || self.engine.args.speculation == 'draft'",
                SPECULATION_IN_WORDS,
            ),
            (
                "has(self.model.draft) || !has(self.engine) || !has(self.engine.args) || "
                "!has(self.engine.args.speculation) || self.engine.args.speculation != 'draft'",
                NO_DRAFT_IN_WORDS,
            ),
            *(
                (
                    f"!has(self.model.draft) || !has(self.podTemplate) || !has(self.podTemplate.{pod}) || "
                    f"!has(self.podTemplate.{pod}.spec) || !has(self.podTemplate.{pod}.spec.volumes) || "
                    f"self.podTemplate.{pod}.spec.volumes.all(each, each.name != {json.dumps(DRAFT_VOLUME)})",
                    DRAFT_VOLUME_IN_WORDS,
                )
                for pod in ("head", "worker")
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
            *KEYS_RULES,
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
        model = self.model
        paths = [] if model.host_path is None else [model.host_path]
        paths += [] if model.adapters is None else adapter_folders(model.adapters)
        taken = [] if model.adapters is None else [(ADAPTER_VOLUMES, ADAPTER_VOLUMES_IN_WORDS)]
        if model.draft is not None:
            paths += [] if model.draft_path is None else [model.draft_path]
            taken.append(((DRAFT_VOLUME,), DRAFT_VOLUME_IN_WORDS))
        resource = self.accelerator.resource if self.accelerator is not None else None
        problems = self.pod_template.problems(
            accelerator=resource, model_paths=paths, claim_folders=_claim_folders(model), taken_volumes=taken
        )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _requests_can_be_held(self) -> Spec:
        needs_gateway = self.autoscaling is not None and self.autoscaling.min_replicas == 0
        if needs_gateway and self.gateway is None:
            raise ValueError(NO_GATEWAY_IN_WORDS)
        return self

    @model_validator(mode="after")
    def _gateway_pods_know_the_keys(self) -> Spec:
        if self.gateway is not None and self.auth is None:
            engine = self.pod_template.head.spec.container("engine")
            if problem := keys_problem(self.engine.env, engine):
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _accelerator_is_used(self) -> Spec:
        if self.model.adapters is not None and self._is_on_gpu:
            raise ValueError(ON_CPU_IN_WORDS)
        if self.accelerator is None:
            return self
        if (tensor := self.parallelism.tensor or 1) > self.accelerator.per_node:
            raise ValueError(f"tensor {tensor} is more than perNode {self.accelerator.per_node}; {_TENSOR_IN_WORDS}")
        if self.engine.args.device == "cpu":
            raise ValueError(_CPU_IN_WORDS)
        return self

    @model_validator(mode="after")
    def _int8_weights_are_possible(self) -> Spec:
        draft = self.model.draft
        given = {OF_MODEL: self.engine.args.quantization, OF_DRAFT: None if draft is None else draft.quantization}
        found = (
            int8_problem(field, value, is_on_gpu=self._is_on_gpu, dtype=self.model.dtype)
            for field, value in given.items()
        )
        if problems := [each for each in found if each]:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _drafts_are_of_one_kind(self) -> Spec:
        kind = self.engine.args.speculation
        if self.model.draft is not None and kind not in (None, "draft"):
            raise ValueError(f"engine.args.speculation: {kind}: {SPECULATION_IN_WORDS}")
        if self.model.draft is None and kind == "draft":
            raise ValueError(NO_DRAFT_IN_WORDS)
        return self

    @property
    def _is_on_gpu(self) -> bool:
        return self.accelerator is not None or self.engine.args.device == "cuda"


def _claim_folders(model: Model) -> list[str]:
    """Returns the folders at which pods mount claims for adapters and for a draft model, but not for the model.

    The claim of the model is left out: templates mount single files over files of the model, such as a chat template.
    """
    folders = [f"{ADAPTERS_FOLDER}/{each}" for each in claims(model.adapters or ()) if each != model.claim]
    has_own_claim = model.draft is not None and model.draft.claim not in (None, model.claim)
    return [*folders, DRAFT_FOLDER] if has_own_claim else folders


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
