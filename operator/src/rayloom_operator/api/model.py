"""Model: the model of a service, `spec.model`, with its adapters and its draft model."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from rayloom_operator.api.adapters import HUB_ONLY_IN_WORDS, MODELS_IN_WORDS, Adapters
from rayloom_operator.api.base import rules
from rayloom_operator.api.draft import Draft
from rayloom_operator.api.model_source import REVISION_RULE, SOURCE_RULE, SOURCES_IN_WORDS, SourcedModel
from rayloom_operator.api.mounted_folders import (
    BACK,
    BACK_IN_WORDS,
    CACHE_FOLDER,
    MODELS_FOLDER,
    NO_MODEL_AT,
    NO_MODEL_FOLDERS,
    SEALED,
    source_at,
    taken_in_words,
)
from rayloom_operator.api.pod_template.reserved_parts import DRAFT_FOLDER
from rayloom_operator.api.pods import ModelCache, SecretKey

DRAFT_FOLDER_IN_WORDS = (
    f"the claim of the model is mounted at {MODELS_FOLDER}, so the draft model cannot be in this folder of the nodes: "
    "move it to another folder, or into a claim"
)
DRAFT_CLAIM_IN_WORDS = (
    f"the claim of the draft model is mounted at {DRAFT_FOLDER}, so neither the model nor an adapter can be in this "
    "folder of the nodes: move it to another folder, or into a claim"
)
CACHE_IN_WORDS = (
    f"model.cache is mounted at {CACHE_FOLDER}, so model.source cannot be file://{CACHE_FOLDER}: move the model to "
    "another folder of the nodes, for example to /data/models"
)
_TAKEN_IN_WORDS = (
    f"pods mount the model at its own path, {taken_in_words('the path', NO_MODEL_FOLDERS, SEALED)}. "
    "Move the model, for example to /data/models or /opt/models of the nodes"
)


class Model(SourcedModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            REVISION_RULE,
            (
                "(!has(self.tokenSecretRef) && !has(self.cache)) || self.source.startsWith('hf://') || "
                "(has(self.adapters) && self.adapters.exists(each, each.source.startsWith('hf://'))) || "
                "(has(self.draft) && self.draft.source.startsWith('hf://'))",
                HUB_ONLY_IN_WORDS,
            ),
            (
                "!has(self.adapters) || !self.source.startsWith('pvc://') || "
                f"self.adapters.all(each, !each.source.startsWith('file://{MODELS_FOLDER}/'))",
                MODELS_IN_WORDS,
            ),
            (
                "!has(self.draft) || !self.source.startsWith('pvc://') || "
                f"!self.draft.source.matches('^file://{MODELS_FOLDER}(/|$)')",
                DRAFT_FOLDER_IN_WORDS,
            ),
            (
                "!has(self.draft) || !self.draft.source.startsWith('pvc://') || "
                f"(!self.source.matches('^file://{DRAFT_FOLDER}(/|$)') && (!has(self.adapters) || "
                f"self.adapters.all(each, !each.source.startsWith('file://{DRAFT_FOLDER}/'))))",
                DRAFT_CLAIM_IN_WORDS,
            ),
            (
                f"!has(self.cache) || !self.source.matches({json.dumps(source_at(CACHE_FOLDER).pattern)})",
                CACHE_IN_WORDS,
            ),
        )
    )

    source: str = Field(
        max_length=1024,
        description=f"Source of the model: {SOURCES_IN_WORDS}. pvc:// is a folder or .gguf file in a "
        "PersistentVolumeClaim of the service's namespace; file:// is a path on the cluster's nodes.",
        json_schema_extra=rules(
            SOURCE_RULE,
            (f"!self.matches({json.dumps(BACK.pattern)})", BACK_IN_WORDS),
            (f"!self.matches({json.dumps(NO_MODEL_AT.pattern)})", _TAKEN_IN_WORDS),
        ),
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="Branch, tag or commit on the hub; only for hf://. A branch is resolved to its commit once, when "
        "this service is first inspected. Default: main.",
    )
    token_secret_ref: SecretKey | None = Field(
        None,
        description="The hub's access token, for private and gated models, draft models and adapters; only for hf://.",
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
    draft: Draft | None = Field(
        None,
        description="A smaller model with the same tokenizer. It proposes next tokens, and the model verifies several "
        "in one step while that saves time. The rank that samples holds all of it. Left out: no draft model; see "
        "engine.args.speculation.",
    )

    @field_validator("source")
    @classmethod
    def _source_can_be_mounted(cls, source: str) -> str:
        if BACK.search(source):
            raise ValueError(f"{source!r} is not allowed: {BACK_IN_WORDS}")
        if NO_MODEL_AT.search(source):
            raise ValueError(f"{source!r} is not allowed: {_TAKEN_IN_WORDS}")
        return source

    @model_validator(mode="after")
    def _hub_settings_have_an_effect(self) -> Model:
        if (self.token_secret_ref or self.cache) and not self.uses_hub:
            raise ValueError(HUB_ONLY_IN_WORDS)
        return self

    @model_validator(mode="after")
    def _adapters_are_beside_the_claim(self) -> Model:
        in_claim = [each.name for each in self.adapters or () if each.path.startswith(f"{MODELS_FOLDER}/")]
        if self.claim is not None and in_claim:
            raise ValueError(f"adapters: {', '.join(in_claim)}: {MODELS_IN_WORDS}")
        return self

    @model_validator(mode="after")
    def _draft_model_is_beside_the_claim(self) -> Model:
        path = None if self.draft is None else self.draft.host_path
        if self.claim is not None and path is not None and f"{path}/".startswith(f"{MODELS_FOLDER}/"):
            raise ValueError(f"draft: {DRAFT_FOLDER_IN_WORDS}")
        return self

    @model_validator(mode="after")
    def _draft_claim_hides_nothing(self) -> Model:
        if self.draft is None or self.draft.claim is None:
            return self
        given = [self.source, *(each.source for each in self.adapters or ())]
        if hidden := [each for each in given if f"{each}/".startswith(f"file://{DRAFT_FOLDER}/")]:
            raise ValueError(f"{', '.join(hidden)}: {DRAFT_CLAIM_IN_WORDS}")
        return self

    @model_validator(mode="after")
    def _cache_is_beside_the_model(self) -> Model:
        if self.cache is not None and source_at(CACHE_FOLDER).search(self.source):
            raise ValueError(f"source: {self.source}: {CACHE_IN_WORDS}")
        return self

    @property
    def uses_hub(self) -> bool:
        """True if pods fetch the model, its draft model or an adapter from the Hugging Face hub."""
        return self.inspects_hub or any(each.is_on_hub for each in self.adapters or ())

    @property
    def inspects_hub(self) -> bool:
        """True if the model or its draft model is on the Hugging Face hub. An inspection reads no adapters."""
        return self.source_kind == "hf" or (self.draft is not None and self.draft.source_kind == "hf")

    @property
    def has_gguf(self) -> bool:
        """True if the model or its draft model is a GGUF file."""
        return self.is_gguf or (self.draft is not None and self.draft.is_gguf)

    @property
    def draft_path(self) -> str | None:
        """Path of the draft model in pods; None if there is no draft model in a claim or on the nodes."""
        draft = self.draft
        if draft is None or draft.claim is None:
            return None if draft is None else draft.host_path
        folder = MODELS_FOLDER if draft.claim == self.claim else DRAFT_FOLDER
        return f"{folder}/{draft.claim_path}".rstrip("/")
