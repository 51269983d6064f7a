"""SourcedModel: the place of a model, which the model of a service and its draft model have in common."""

from __future__ import annotations

import json
import re

from pydantic import Field, field_validator, model_validator

from rayloom_operator.api.base import Part, rules
from rayloom_operator.api.problems import source_hint

BUILTIN_MODELS = ("smollm2-135m",)

_SOURCES = (
    r"hf://[\w.-]+/[\w.-]+",
    r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[\w.-]+)*/?",
    r"file:///.+",
    "builtin://(" + "|".join(BUILTIN_MODELS) + ")",
)
SOURCES_IN_WORDS = "hf://ORG/NAME, pvc://CLAIM/PATH, file:///PATH, " + ", ".join(
    f"builtin://{name}" for name in BUILTIN_MODELS
)
SOURCE_RULE = (
    f"self.matches({json.dumps('^(' + '|'.join(_SOURCES) + ')$')})",
    f"this is not a model source; use one of {SOURCES_IN_WORDS}",
)
SOURCE_SCHEMA = rules(SOURCE_RULE)
REVISION_RULE = (
    "!has(self.revision) || self.source.startsWith('hf://')",
    "revision has an effect for hf:// sources only: remove it, or use an hf:// source",
)


class SourcedModel(Part):
    source: str = Field(max_length=1024, description="Source of the model.", json_schema_extra=SOURCE_SCHEMA)
    revision: str | None = Field(None, min_length=1, description="Branch, tag or commit on the hub; only for hf://.")

    @field_validator("source")
    @classmethod
    def _source_is_known(cls, source: str) -> str:
        if not any(re.fullmatch(pattern, source, re.ASCII) for pattern in _SOURCES):
            hint = source_hint(source, BUILTIN_MODELS)
            raise ValueError(f"{source!r} is not a model source; use one of {SOURCES_IN_WORDS}{hint}")
        return source

    @model_validator(mode="after")
    def _revision_has_an_effect(self) -> SourcedModel:
        if self.revision is not None and self.source_kind != "hf":
            raise ValueError(
                f"revision {self.revision!r} has no effect for {self.source!r}; remove it, or use an hf:// source"
            )
        return self

    @property
    def source_kind(self) -> str:
        """The part of `source` before `://`: hf, pvc, file or builtin."""
        return self.source.split("://", 1)[0]

    @property
    def claim(self) -> str | None:
        """Name of the PersistentVolumeClaim with the model; None if the model is not in a claim."""
        return self.source.removeprefix("pvc://").partition("/")[0] if self.source_kind == "pvc" else None

    @property
    def claim_path(self) -> str:
        """Path of a pvc:// model in its claim, without a slash at either end; empty for another source."""
        return self.source.removeprefix("pvc://").partition("/")[2].strip("/") if self.source_kind == "pvc" else ""

    @property
    def host_path(self) -> str | None:
        """Path of a file:// model on the nodes, at which pods mount it; None for another source."""
        return self.source.removeprefix("file://").rstrip("/") if self.source_kind == "file" else None

    @property
    def is_gguf(self) -> bool:
        """True if `source` is a GGUF file. Then each pod converts the file for itself."""
        return self.source_kind in ("pvc", "file") and self.source.rstrip("/").endswith(".gguf")
