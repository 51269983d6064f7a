"""The engine's part of a spec: image, resources, environment and settings, `spec.engine`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from rayloom_operator.api.base import Part, Quantity
from rayloom_operator.api.base import rules as _rules
from rayloom_operator.api.engine_args import EngineArgs
from rayloom_operator.api.pod_template.reserved_env import RESERVED_IN_WORDS, RESERVED_RULE, is_reserved
from rayloom_operator.api.pods import LocalObject


class EnvVar(Part):
    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        max_length=256,
        description="Name of an environment variable.",
        json_schema_extra=_rules((RESERVED_RULE, RESERVED_IN_WORDS)),
    )
    value: str = Field(description="Value of the variable, a string: put numbers and true/false in quotes.")

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if is_reserved(name):
            raise ValueError(f"{name}: {RESERVED_IN_WORDS}")
        return name


class Resources(Part):
    requests: dict[str, Quantity] = Field(
        default_factory=dict,
        description="Amounts that a node must have free, by resource name; text such as '500m' or '1Gi'. Defaults for "
        "each rank of a pod: cpu 500m; memory 4Gi with `accelerator`, and without it enough for the rank's weights and "
        "process, at least 1Gi. Default of ephemeral-storage: enough for the files of the model that the pod downloads "
        "or converts. A pod with model.cache downloads none.",
    )
    limits: dict[str, Quantity] = Field(
        default_factory=dict,
        description="Amounts that may be used at most, by resource name; text such as '4' or '8Gi'.",
    )


class Engine(Part):
    image: str | None = Field(
        None, min_length=1, description="Image of the engine's pods. Default: the operator's setting engine.image."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="Pull policy of the image."
    )
    image_pull_secrets: tuple[LocalObject, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="Secrets with the registry's credentials, in the service's namespace.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Resources of each worker pod's main container, which runs the ranks of one or more stages. The "
        "operator adds the accelerators.",
    )
    args: EngineArgs = Field(default_factory=EngineArgs, description="Settings of the engine.")
    env: tuple[EnvVar, ...] = Field(
        (),
        strict=False,
        max_length=256,
        description="Environment variables of the engine's processes, each name once. Whoever may set them can run "
        "code in the engine's pods, for example by LD_PRELOAD or PYTHONPATH. Variables that the operator sets are "
        "refused.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )

    @field_validator("env")
    @classmethod
    def _names_differ(cls, env: tuple[EnvVar, ...]) -> tuple[EnvVar, ...]:
        names = [variable.name for variable in env]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)} is given more than once; keep one value of each name")
        return env
