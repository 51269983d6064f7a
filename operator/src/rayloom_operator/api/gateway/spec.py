"""`spec.gateway`: pods that keep the clients' connections, so that a stream outlives the engine that computes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part, Quantity, number_of, rules
from rayloom_operator.api.gateway.route import GatewayRoute

MAX_GATEWAYS = 16
_REPLICAS_IN_WORDS = f"use 0 to {MAX_GATEWAYS} gateway pods; with 0, clients reach the engines directly"
_ROUTE_IN_WORDS = "a route leads to gateway pods: raise gateway.replicas to 1 or more, or remove gateway.route"
# A gateway computes nothing on devices, so it can use no other resources.
_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_RESOURCES_IN_WORDS = "a gateway uses cpu, memory and ephemeral-storage only: remove the other resources"
_RESOURCES_RULE = f"self.all(name, name in {list(_RESOURCES)})"


def _is_a_number_of_gateways(number: int) -> int:
    if not 0 <= number <= MAX_GATEWAYS:
        raise ValueError(f"{number} is not possible: {_REPLICAS_IN_WORDS}")
    return number


def _are_known(amounts: dict[str, str]) -> dict[str, str]:
    others = sorted(amounts.keys() - set(_RESOURCES))
    if others:
        raise ValueError(f"{', '.join(others)}: {_RESOURCES_IN_WORDS}")
    return amounts


Amounts = Annotated[dict[str, Quantity], AfterValidator(_are_known)]


class GatewayResources(Part):
    requests: Amounts = Field(
        default_factory=dict,
        max_length=len(_RESOURCES),
        description="Amounts that a node must have free; text such as '500m' or '1Gi'. Defaults: cpu 200m, memory "
        "512Mi.",
        json_schema_extra=rules((_RESOURCES_RULE, _RESOURCES_IN_WORDS)),
    )
    limits: Amounts = Field(
        default_factory=dict,
        max_length=len(_RESOURCES),
        description="Amounts that may be used at most; text such as '2' or '2Gi'.",
        json_schema_extra=rules((_RESOURCES_RULE, _RESOURCES_IN_WORDS)),
    )

    @model_validator(mode="after")
    def _requests_are_within_limits(self) -> GatewayResources:
        for name, request in self.requests.items():
            limit = self.limits.get(name)
            if limit is not None and number_of(request) > number_of(limit):
                given = f"the request {name} {request} is more than the limit {limit}"
                raise ValueError(f"{given}: lower it, or raise the limit")
        return self


class Gateway(Part):
    """The pods to which clients connect. Without a cluster only `holdSeconds` has an effect."""

    model_config = ConfigDict(json_schema_extra=rules(("!has(self.route) || self.replicas > 0", _ROUTE_IN_WORDS)))

    replicas: Annotated[int, AfterValidator(_is_a_number_of_gateways)] = Field(
        2,
        description=f"Number of gateway pods, 0 to {MAX_GATEWAYS}. With 0, clients reach the engines directly, and "
        "the engines stay ready for gateways. A change restarts no engine.",
        json_schema_extra=rules((f"self >= 0 && self <= {MAX_GATEWAYS}", _REPLICAS_IN_WORDS)),
    )
    image: str | None = Field(
        None,
        min_length=1,
        description="Image of the gateway pods. Default: the image of the engines. A change restarts no engine.",
    )
    resources: GatewayResources = Field(
        default_factory=GatewayResources,
        description="Resources of each gateway pod. A change restarts no engine.",
    )
    hold_seconds: int = Field(
        300,
        ge=0,
        le=86400,
        description="Seconds for which a request waits while no engine can take it; then it gets 503. A change "
        "restarts no engine.",
    )
    route: GatewayRoute | None = Field(
        None,
        description="An HTTPRoute or an Ingress that leads from outside of the cluster to the gateway pods. Left out: "
        "there is none. A change restarts neither engines nor gateway pods.",
    )

    @model_validator(mode="after")
    def _route_leads_to_pods(self) -> Gateway:
        if self.route is not None and self.replicas == 0:
            raise ValueError(_ROUTE_IN_WORDS)
        return self
