"""The spec of LLMGateway v1alpha1: one URL for several LLMServices of a namespace.

The CRD's schema is generated from these classes, as for LLMService (`api/spec.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from rayloom_operator.api.base import MAP_BY_NAME, Part, rules
from rayloom_operator.api.engine_args import ROOT_PATH
from rayloom_operator.api.gateway.route import GatewayRoute
from rayloom_operator.api.gateway.spec import MAX_GATEWAYS, GatewayResources
from rayloom_operator.api.llmgateway.alias import Alias
from rayloom_operator.api.llmgateway.selector import ServiceSelector
from rayloom_operator.api.pods import Auth, LocalObject, Scheduling
from rayloom_operator.api.problems import explain
from rayloom_operator.api.spec import NAME_RULE, Metadata, without_server_fields
from rayloom_operator.errors import SpecError

KIND = "LLMGateway"
_REPLICAS_IN_WORDS = f"use 0 to {MAX_GATEWAYS} gateway pods; with 0, requests to the URL fail"
_ROUTE_IN_WORDS = "a route leads to gateway pods: raise replicas to 1 or more, or remove route"


def _is_a_number_of_pods(number: int) -> int:
    if not 0 <= number <= MAX_GATEWAYS:
        raise ValueError(f"{number} is not allowed: {_REPLICAS_IN_WORDS}")
    return number


class GatewaySpec(Part):
    model_config = ConfigDict(json_schema_extra=rules(("!has(self.route) || self.replicas > 0", _ROUTE_IN_WORDS)))

    services: ServiceSelector = Field(
        description="LLMServices of the namespace that clients reach, each by its served name. A service needs "
        "spec.gateway for this; replicas 0 is enough."
    )
    replicas: Annotated[int, AfterValidator(_is_a_number_of_pods)] = Field(
        2,
        description=f"Number of gateway pods, 0 to {MAX_GATEWAYS}.",
        json_schema_extra=rules((f"self >= 0 && self <= {MAX_GATEWAYS}", _REPLICAS_IN_WORDS)),
    )
    image: str | None = Field(
        None, min_length=1, description="Image of the gateway pods. Default: the operator's setting engine.image."
    )
    image_pull_secrets: tuple[LocalObject, ...] = Field(
        (), strict=False, max_length=16, description="Secrets with the registry's credentials."
    )
    resources: GatewayResources = Field(default_factory=GatewayResources, description="Resources of each gateway pod.")
    scheduling: Scheduling = Field(
        default_factory=Scheduling, description="Node labels, tolerations and priority of the gateway pods."
    )
    hold_seconds: int = Field(
        300,
        ge=0,
        le=86400,
        description="Seconds for which a request waits while no engine of its service can take it; then it gets 503.",
    )
    drain_seconds: int = Field(
        30, ge=0, le=86400, description="Seconds for which a terminating gateway pod may finish its running requests."
    )
    root_path: str | None = Field(
        None,
        pattern=ROOT_PATH,
        description="Path prefix under which the API is served too, such as /llm. Set it if spec.route or a proxy "
        "forwards requests with this prefix and does not remove it. A change replaces the gateway pods.",
    )
    auth: Auth | None = Field(
        None,
        description="API keys for every name. Default: the keys of spec.auth of each service, for its own name.",
    )
    aliases: tuple[Alias, ...] = Field(
        (),
        strict=False,
        max_length=64,
        description="Further names, each for one or several services.",
        json_schema_extra=MAP_BY_NAME,
    )
    route: GatewayRoute | None = Field(
        None,
        description="An HTTPRoute or an Ingress that leads from outside of the cluster to the gateway pods. Left out: "
        "there is none. A change replaces no pod.",
    )

    @field_validator("aliases")
    @classmethod
    def _names_differ(cls, aliases: tuple[Alias, ...]) -> tuple[Alias, ...]:
        names = [alias.name for alias in aliases]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)} is given more than once; keep one alias of each name")
        return aliases

    @model_validator(mode="after")
    def _route_leads_to_pods(self) -> GatewaySpec:
        if self.route is not None and self.replicas == 0:
            raise ValueError(_ROUTE_IN_WORDS)
        return self


class LLMGateway(Part):
    """One URL for several LLMServices."""

    model_config = ConfigDict(json_schema_extra=rules(NAME_RULE))

    api_version: Literal["rayloom.dev/v1alpha1"] = Field(description="Version of this document's schema.")
    kind: Literal["LLMGateway"] = Field(description="Kind of this document.")
    metadata: Metadata = Field(description="Name and labels.")
    spec: GatewaySpec = Field(description="The services, and the pods in front of them.")


def parse_gateway(document: object) -> LLMGateway:
    """Returns the LLMGateway in a decoded YAML document. `document` is not changed.

    Raises SpecError with one line for each invalid field.
    """
    try:
        return LLMGateway.model_validate(without_server_fields(document))
    except ValidationError as error:
        raise SpecError(explain(error, LLMGateway)) from error
