"""Draft: the draft model of a service, `spec.model.draft`. The engine verifies the tokens that it proposes."""

from __future__ import annotations

import json
import re
from typing import Literal

from pydantic import ConfigDict, Field, field_validator

from rayloom_operator.api.base import rules
from rayloom_operator.api.model_source import REVISION_RULE, SOURCE_RULE, SOURCES_IN_WORDS, SourcedModel
from rayloom_operator.api.mounted_folders import CLOSED, HIDING, UP, taken_in_words

SPECULATION_IN_WORDS = (
    "model.draft names a draft model, and engine.args.speculation chooses another kind of drafts: remove one of the two"
)
NO_DRAFT_IN_WORDS = (
    "engine.args.speculation is draft, and no draft model is named: name it in model.draft.source, or use ngram"
)
_UP_IN_WORDS = "the path must not have an empty part, or a part '.' or '..'; write it without them"
# Two slashes inside a path of the nodes. The claims' pattern refuses them.
_EMPTY = re.compile(r"^file://.*//")
_TAKEN = re.compile(rf"^file://(({'|'.join(HIDING)})/?|({'|'.join(CLOSED)})(/.*)?)$")
_TAKEN_IN_WORDS = (
    f"pods mount the draft model at its own path, {taken_in_words('the path')}. "
    "Move the draft model, for example to /data/drafts or /opt/drafts of the nodes"
)


class Draft(SourcedModel):
    model_config = ConfigDict(json_schema_extra=rules(REVISION_RULE))

    source: str = Field(
        max_length=1024,
        description=f"Source of the draft model: {SOURCES_IN_WORDS}. It needs the tokenizer of the model.",
        json_schema_extra=rules(
            SOURCE_RULE,
            (f"!self.matches({json.dumps(UP.pattern)}) && !self.matches({json.dumps(_EMPTY.pattern)})", _UP_IN_WORDS),
            (f"!self.matches({json.dumps(_TAKEN.pattern)})", _TAKEN_IN_WORDS),
        ),
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

    @field_validator("source")
    @classmethod
    def _source_can_be_mounted(cls, source: str) -> str:
        if UP.search(source) or _EMPTY.search(source):
            raise ValueError(f"{source!r} is not allowed: {_UP_IN_WORDS}")
        if _TAKEN.search(source):
            raise ValueError(f"{source!r} is not allowed: {_TAKEN_IN_WORDS}")
        return source
