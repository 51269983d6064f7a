"""`spec.aliases` of an LLMGateway: further names, each for one or several services."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part, rules
from rayloom_operator.api.pods import Auth

MAX_WEIGHT = 1000
_MAX_TARGETS = 16
_NO_WEIGHT_IN_WORDS = "every target has weight 0; raise the weight of at least one"
_NO_TARGETS_IN_WORDS = "an alias without targets cannot answer requests; add a target, or remove the alias"
# The limits of a name's length and characters: gateway pods write names into an HTTP header.
MAX_NAME = 256
_NAME = "[!-~]+"
NAME_IN_WORDS = f"use 1 to {MAX_NAME} letters, digits and signs of ASCII, without spaces"
_NAME_RULE = f"self.matches('^{_NAME}$')"
_WEIGHT_IN_WORDS = f"use a weight from 0 to {MAX_WEIGHT}; a target with 0 gets no requests"


def _is_a_weight(number: int) -> int:
    if not 0 <= number <= MAX_WEIGHT:
        raise ValueError(f"{number} is not allowed: {_WEIGHT_IN_WORDS}")
    return number


def is_name(text: str) -> bool:
    """Returns whether gateway pods can serve a model under this name."""
    return len(text) <= MAX_NAME and re.fullmatch(_NAME, text) is not None


def _is_a_name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"{text!r} is not possible: {NAME_IN_WORDS}")
    return text


class AliasTarget(Part):
    service: str = Field(
        min_length=1, max_length=253, description="Name of an LLMService that spec.services selects: its metadata.name."
    )
    weight: Annotated[int, AfterValidator(_is_a_weight)] = Field(
        1,
        description=f"Share of the requests in relation to the weights of the other targets, 0 to {MAX_WEIGHT}.",
        json_schema_extra=rules((f"self >= 0 && self <= {MAX_WEIGHT}", _WEIGHT_IN_WORDS)),
    )


class Alias(Part):
    model_config = ConfigDict(
        json_schema_extra=rules(("self.targets.exists(target, target.weight > 0)", _NO_WEIGHT_IN_WORDS))
    )

    name: Annotated[str, AfterValidator(_is_a_name)] = Field(
        min_length=1,
        max_length=MAX_NAME,
        description="Name that clients put into `model`: visible ASCII characters. It differs from the served name of "
        "every selected service.",
        json_schema_extra=rules((_NAME_RULE, NAME_IN_WORDS)),
    )
    targets: tuple[AliasTarget, ...] = Field(
        strict=False,
        max_length=_MAX_TARGETS,
        description="Services that answer requests for this name, each service once.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["service"],
            **rules(("size(self) > 0", _NO_TARGETS_IN_WORDS)),
        },
    )
    sticky_by: Literal["user", "none"] = Field(
        "user",
        description="user: requests with the same `user` go to the same target while the targets stay the same. none: "
        "each request is drawn by the weights.",
    )
    auth: Auth | None = Field(
        None,
        description="API keys of this name. Default: spec.auth; without that, the keys of the targets' services, which "
        "must then be the same.",
    )

    @model_validator(mode="after")
    def _targets_can_be_drawn(self) -> Alias:
        services = [target.service for target in self.targets]
        repeated = sorted({each for each in services if services.count(each) > 1})
        if not services:
            raise ValueError(_NO_TARGETS_IN_WORDS)
        if repeated:
            raise ValueError(f"{', '.join(repeated)} is given more than once; keep one target of each service")
        if all(target.weight == 0 for target in self.targets):
            raise ValueError(_NO_WEIGHT_IN_WORDS)
        return self
