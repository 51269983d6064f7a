"""Draft: the draft model of a service, `spec.model.draft`. The engine verifies the tokens that it proposes."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from rayloom_operator.api.base import rules
from rayloom_operator.api.model_source import REVISION_RULE, SOURCE_SCHEMA, SOURCES_IN_WORDS, SourcedModel

SPECULATION_IN_WORDS = (
    "model.draft names a draft model, and engine.args.speculation chooses another kind of drafts: remove one of the two"
)
NO_DRAFT_IN_WORDS = (
    "engine.args.speculation is draft, and no draft model is named: name it in model.draft.source, or use ngram"
)
DRAFT_INT8_IN_WORDS = "model.draft.quantization int8 works on CPU only: remove it, or the accelerator"


class Draft(SourcedModel):
    model_config = ConfigDict(json_schema_extra=rules(REVISION_RULE))

    source: str = Field(
        max_length=1024,
        description=f"Source of the draft model: {SOURCES_IN_WORDS}. It needs the tokenizer of the model.",
        json_schema_extra=SOURCE_SCHEMA,
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="Branch, tag or commit on the hub; only for hf://. A branch is resolved to its commit once. "
        "Default: main.",
    )
    quantization: Literal["auto", "none", "int8"] | None = Field(
        None,
        description="Form of the draft model's weights in memory, as engine.args.quantization is for the model. int8: "
        "only on CPU. Default: auto.",
    )
