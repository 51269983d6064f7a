"""The termination message of `rayloom-engine inspect`: the facts about a model, or why it cannot be served.

Kubernetes cuts a termination message after 4096 bytes, so both forms are bounded. The operator reads the message
(schemas/inspection.v2.json). A new field that readers may ignore keeps the version. A new part of the costs that
readers must add up requires a new version.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rayloom_engine.config import ModelBackend
from rayloom_engine.errors import ConfigError, ModelError, ModelFault
from rayloom_engine.models.checkpoint.config_json import refuses_broken
from rayloom_engine.models.checkpoint.limits import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_PARAMETERS,
    MAX_POSITIONS,
    MAX_SIZE,
    MAX_VOCAB,
)
from rayloom_engine.models.checkpoint.source import ResolvedModel, resolve_config, tokenizer_folder
from rayloom_engine.models.costs import Costs, model_costs
from rayloom_engine.models.draft_checks import check_draft, check_tokenizers
from rayloom_engine.models.draft_facts import DraftFacts
from rayloom_engine.models.int8_shape import aligned_counts
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.reading import read_model_shape
from rayloom_engine.models.shape import ExpertSizes, ModelShape
from rayloom_engine.models.shard_counts import shard_counts

MAX_FACTS_BYTES = 3500  # the rest of a termination message is reserved for fields of later versions
_MAX_MESSAGE = 700  # characters
_MAX_BYTES = 4095


class _InspectionPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shape(_InspectionPart):
    """A description of a decoder-only model, as its config.json gives it. Readers show it and compute with `costs`."""

    architecture: str = Field(description="Class of the model, such as LlamaForCausalLM.")
    num_layers: int = Field(ge=1, le=MAX_LAYERS, description="Decoder layers.")
    hidden_size: int = Field(ge=1, le=MAX_SIZE, description="Width of a layer.")
    intermediate_size: int = Field(ge=1, le=MAX_SIZE, description="Width of the feed-forward part.")
    num_heads: int = Field(ge=1, le=MAX_HEADS, description="Query heads.")
    num_kv_heads: int = Field(ge=1, le=MAX_HEADS, description="Key and value heads.")
    head_dim: int = Field(ge=1, le=MAX_SIZE, description="Width of a head.")
    vocab_size: int = Field(ge=1, le=MAX_VOCAB, description="Rows of the embedding.")
    max_position_embeddings: int = Field(ge=1, le=MAX_POSITIONS, description="Longest context in tokens.")
    tie_word_embeddings: bool = Field(description="The output uses the embedding's weights.")
    checkpoint_dtype: str = Field(description="Type of the weights: bfloat16, float16 or float32.")
    qkv_bias: bool = Field(description="Query, key and value have a bias.")
    o_bias: bool = Field(description="The attention's output has a bias.")
    mlp_bias: bool = Field(description="The feed-forward part has biases.")
    qk_norm: bool = Field(description="Queries and keys are normalised head by head.")
    num_experts: int | None = Field(
        None, ge=1, le=MAX_SIZE, description="Routed experts of a layer; absent if a layer has one MLP for all tokens."
    )
    num_experts_per_token: int | None = Field(
        None, ge=1, le=MAX_SIZE, description="Routed experts that the router selects for each token."
    )
    moe_intermediate_size: int | None = Field(None, ge=1, le=MAX_SIZE, description="Width of a routed expert.")
    model_backend: Literal["transformers"] | None = Field(
        None,
        description="transformers: its modules compute the model; none: the engine's own decoder.",
    )
    attention_span: int | None = Field(
        None,
        description="Positions that a token sees in the layer with the widest window, itself included; "
        "none when a layer sees all.",
    )


class Fault(_InspectionPart):
    reason: ModelFault = Field(description="The kind of fault, as one word of a closed list.")
    message: str = Field(description="The fault and the change that is needed, as a sentence.")


class Inspection(_InspectionPart):
    """Either `error` is set, or all other fields are."""

    version: Literal["v2"] = Field("v2", description="Version of this document's schema. Documents of v1 had no costs.")
    commit: str | None = Field(None, description="The commit that the revision stands for; only of the hub's models.")
    shape: Shape | None = Field(None, description="The model's description.")
    num_parameters: int | None = Field(
        None, ge=1, le=MAX_PARAMETERS, description="Weights of the model; a matrix with two uses counts once."
    )
    num_active_parameters: int | None = Field(
        None,
        ge=1,
        le=MAX_PARAMETERS,
        description="Parameters that one token uses: all but those of the routed experts that the router does not "
        "select for it. Absent if the model has no experts.",
    )
    quantization: str | None = Field(
        None, description="How the checkpoint's weights are quantised; absent if they are dense."
    )
    costs: Costs | None = Field(None, description="The memory that the model takes, in parts to add.")
    draft: DraftFacts | None = Field(
        None,
        description="The draft model, if one was named. If both models have a tokenizer.json, the tokens agree.",
    )
    error: Fault | None = Field(None, description="Why the model cannot be served.")

    def text(self) -> str:
        """Returns the document as one line of at most 4095 bytes; a document of facts has at most MAX_FACTS_BYTES."""
        return self.model_dump_json(exclude_none=True)


def inspect_model(model: str, revision: str | None, backend: ModelBackend = "auto") -> tuple[ResolvedModel, ModelShape]:
    """Returns a model's commit and shape; reads only its configuration. Raises ModelError.

    `backend`: as the setting model_backend.
    """
    with tempfile.TemporaryDirectory(prefix="rayloom-inspect-") as scratch:
        try:
            with refuses_broken(model):
                resolved = resolve_config(model, revision, Path(scratch))
                return resolved, read_model_shape(resolved.path, backend)
        except ModelError as error:
            # The configuration of a GGUF file is first written to a scratch folder. Instead of this folder, the message
            # names the file that the user gave.
            message = re.sub(rf"{re.escape(scratch)}(/[\w.-]+)?", lambda _: model, str(error))
            raise ModelError(message, error.fault) from error


def inspect_draft(
    model: str, revision: str | None, target: ResolvedModel, target_shape: ModelShape
) -> tuple[ResolvedModel, ModelShape]:
    """Returns a draft model's commit and shape; reads its configuration, and both tokenizers if they are files.

    Raises ModelError if the model cannot be the draft model of `target`.
    """
    try:
        resolved, shape = inspect_model(model, revision, "native")
    except ModelError as error:
        raise ModelError(f"draft_model: {error}", error.fault) from error
    folders = [tokenizer_folder(each) for each in (resolved, target)]
    try:
        check_draft(model, shape, target_shape)
        # The configuration of a GGUF file was in a scratch folder, without the tokenizer. An engine converts the whole
        # file, and then compares the tokenizers.
        if all(folder.is_dir() for folder in folders):
            check_tokenizers(model, *folders)
    except ConfigError as error:
        raise ModelError(str(error), "Unsupported") from error
    return resolved, shape


def facts(resolved: ResolvedModel, shape: ModelShape, draft: DraftFacts | None = None) -> Inspection:
    """Returns the document for a model that can be served.

    If the costs for all numbers of ranks make the document too long, the largest numbers of ranks are left out. This
    happens only with more than 30 possible numbers of ranks. Published models have too few heads for that.
    """
    known = {**dataclasses.asdict(shape), "attention_span": shape.attention_span}
    experts = shape.expert_sizes
    known |= dict.fromkeys(ExpertSizes._fields) if experts is None else experts._asdict()
    known["model_backend"] = "transformers" if isinstance(shape, MeasuredShape) else None
    described = Shape.model_validate({name: known[name] for name in Shape.model_fields})
    counts = aligned_counts(shape, shard_counts(shape))
    while True:
        found = Inspection(
            commit=resolved.commit,
            shape=described,
            num_parameters=shape.num_parameters,
            num_active_parameters=None if experts is None else shape.num_active_parameters,
            quantization=None if shape.scheme is None else shape.scheme.label,
            costs=model_costs(shape, counts),
            draft=draft,
        )
        if len(found.text().encode()) <= MAX_FACTS_BYTES or len(counts) == 1:
            return found
        counts = counts[:-1]


def failure(error: ModelError) -> Inspection:
    """Returns the document for a model that cannot be served, with as much of the error's message as fits."""
    # The message may contain a path with bytes that are not UTF-8.
    message = str(error)[:_MAX_MESSAGE].encode(errors="replace").decode()
    while True:
        found = Inspection(error=Fault(reason=error.fault, message=message))
        # JSON may need six bytes for a character.
        if len(found.text().encode()) <= _MAX_BYTES:
            return found
        message = message[: len(message) * 9 // 10]
