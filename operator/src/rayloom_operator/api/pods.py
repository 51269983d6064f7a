"""Fields of the spec that correspond to fields of pods: Secrets, volumes of the cache, scheduling, tolerations."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part
from rayloom_operator.api.base import rules as _rules

_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_ONE_CACHE_IN_WORDS = "give either persistentVolumeClaim or hostPath"
_TOLERATION_IN_WORDS = (
    "a toleration needs a key, or operator Exists; Exists takes no value; tolerationSeconds needs effect NoExecute"
)


class SecretKey(Part):
    name: str = Field(pattern=_NAME, max_length=253, description="Name of a Secret in the service's namespace.")
    # A Secret cannot have other keys. In the pods of an LLMGateway, the key is part of a path. The API server refuses a
    # path with '..', so one such key would keep the pods of all services of the LLMGateway from being updated.
    key: str = Field(
        pattern=r"^[.]?[-_a-zA-Z0-9][-._a-zA-Z0-9]*$",
        max_length=253,
        description="Key in the Secret's data: letters, digits, '-', '_' and '.'; it is not '.' and does not begin "
        "with '..'.",
    )


class LocalObject(Part):
    name: str = Field(pattern=_NAME, max_length=253, description="Name of an object in the service's namespace.")


class ModelCache(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(("has(self.persistentVolumeClaim) != has(self.hostPath)", _ONE_CACHE_IN_WORDS))
    )

    persistent_volume_claim: str | None = Field(
        None,
        pattern=_NAME,
        max_length=253,
        description="Name of a PersistentVolumeClaim in the service's namespace to which all pods can write: with "
        "access mode ReadWriteMany, or with ReadWriteOnce if all pods run on one node.",
    )
    host_path: str | None = Field(
        None,
        pattern="^/.+$",
        max_length=1024,
        description="A folder that must exist on each node and belong to user 1000. The namespace and the operator's "
        "setting allowHostPaths must allow it.",
    )

    @model_validator(mode="after")
    def _has_one_volume(self) -> ModelCache:
        if (self.persistent_volume_claim is None) == (self.host_path is None):
            raise ValueError(_ONE_CACHE_IN_WORDS)
        return self


class Auth(Part):
    api_key_secret_ref: SecretKey = Field(
        description="API keys that clients may use, one per line. An engine reads them when it starts."
    )


class Toleration(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "(has(self.key) || (has(self.operator) && self.operator == 'Exists')) && "
                "(!has(self.operator) || self.operator != 'Exists' || !has(self.value)) && "
                "(!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute'))",
                _TOLERATION_IN_WORDS,
            )
        )
    )

    key: str | None = Field(
        None,
        min_length=1,
        description="Key of the taint. With operator Exists, the key may be left out: then every taint is tolerated.",
    )
    operator: Literal["Exists", "Equal"] | None = Field(
        None, description="Exists: the taint may have any value. Equal, the default: its value must be `value`."
    )
    value: str | None = Field(None, description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Effect of the taint. Left out: every effect."
    )
    toleration_seconds: int | None = Field(
        None, ge=0, description="Seconds for which a NoExecute taint is tolerated. Left out: without a limit."
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Toleration:
        is_exists = self.operator == "Exists"
        has_value = self.value is not None  # the API server refuses an empty value, too
        has_seconds = self.toleration_seconds is not None
        if not (self.key or is_exists) or (is_exists and has_value) or (has_seconds and self.effect != "NoExecute"):
            raise ValueError(_TOLERATION_IN_WORDS)
        return self


class Scheduling(Part):
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="Labels that a node must have to run any pod of the service."
    )
    tolerations: tuple[Toleration, ...] = Field(
        (), strict=False, max_length=64, description="Taints of nodes that the pods tolerate."
    )
    priority_class_name: str | None = Field(
        None, pattern=_NAME, max_length=253, description="PriorityClass of the pods. Default: the cluster's."
    )
