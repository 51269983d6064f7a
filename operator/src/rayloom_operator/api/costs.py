"""Costs: the memory that a model needs, in parts. The engine's `inspect` returns the parts, and sizing adds them.

The operator does not trust the document with the costs. A tenant chooses the image that writes this document, and the
operator serves all tenants. So each number and each list has a limit, far beyond any existing model. The limits are
also checked when a status is read back.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

MAX_LAYERS = 1000
MAX_TENSOR = 4096
MAX_POSITIONS = 1 << 30
# The largest number of parameters of a model. With this limit, the bytes of all parameters fit into the 64-bit numbers
# of a status.
MAX_PARAMETERS = 1 << 50
_MAX_BYTES = 4 * MAX_PARAMETERS
# The largest length of a list. A list has one number for each tensor size, and each tensor size divides the number of
# heads. A number up to 4,096 has at most 48 divisors.
_MAX_NUMBERS = 64
_MAX_KINDS = 26  # kinds of layers: each has a letter in `Costs.layers`
_MAX_HEAD_LAYERS = 1e15
_MAX_RANK_MULTIPLE = 256
_MAX_PAGE_BYTES = 1 << 30  # bytes of the largest huge page of any processor
_RUN = re.compile(r"([1-9][0-9]{0,3})?([a-z])")

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _weight_type(name: str) -> str:
    if name not in ELEMENT_BYTES:
        raise ValueError(f"{name[:80]!r} is not a type of weights; known are {', '.join(ELEMENT_BYTES)}")
    return name


WeightType = Annotated[str, AfterValidator(_weight_type)]
Count = Annotated[int, Field(ge=0, le=_MAX_BYTES)]
# `strict=False`, because a status has lists here. Strict validation accepts a list as a tuple only in JSON text.
Counts = Annotated[tuple[Count, ...], Field(strict=False, max_length=_MAX_NUMBERS)]


class CostsPart(BaseModel):
    # Fields are in snake_case in the engine's document, and in camelCase in the status.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class Amounts(CostsPart):
    """The memory of one part of a model on a rank. Each list has one number for each tensor size in `Costs.tensor`."""

    elements: Counts = Field(description="How many numbers of the type in which a rank computes the part has.")
    packed: Counts | None = Field(
        None,
        alias="bytes",
        description="Bytes that do not depend on the type; absent if there are none.",
    )

    kept_elements: Counts | None = Field(
        None,
        description="In place of `elements` on a rank that keeps the checkpoint's quantised weights; absent if the "
        "weights are dense.",
    )
    kept_bytes: Counts | None = Field(
        None, description="In place of `bytes` on a rank that keeps the checkpoint's quantised weights."
    )

    @property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        """The lists of numbers that the document has. A list that is None is left out."""
        given = (self.elements, self.packed, self.kept_elements, self.kept_bytes)
        return tuple(numbers for numbers in given if numbers is not None)

    def bytes_at(self, index: int, element_bytes: int, *, keeps_quantised: bool = False) -> int:
        """Returns the bytes on each rank for the tensor size `Costs.tensor[index]`, with `element_bytes` per number.

        `keeps_quantised`: whether a rank keeps the checkpoint's quantised weights.
        """
        if keeps_quantised and self.kept_elements is not None:
            kept = 0 if self.kept_bytes is None else self.kept_bytes[index]
            return self.kept_elements[index] * element_bytes + kept
        return self.elements[index] * element_bytes + (self.packed[index] if self.packed is not None else 0)


class LayerKind(CostsPart):
    weights: Amounts = Field(description="Weights of one such layer.")
    kv: Amounts = Field(description="Keys and values of one token in one such layer.")
    window: int | None = Field(
        None, ge=1, le=MAX_POSITIONS, description="Positions that a token sees, itself included; absent for all."
    )


class StepCosts(CostsPart):
    token: Amounts = Field(description="Memory of one token of a step, beside weights and KV cache.")
    sequence_bytes: Count = Field(description="Bytes that one sequence of a step takes.")


class AdapterCosts(CostsPart):
    layer: Amounts = Field(description="Weights that a LoRA adapter of LoRA rank 1 has in one layer.")
    token_bytes: Counts = Field(description="Bytes of one token of a step with adapters, in addition to `step`.")
    rank_multiple: Annotated[int, Field(ge=1, le=_MAX_RANK_MULTIPLE)] = Field(
        description="A LoRA rank counts as the next multiple of this number."
    )
    page_bytes: Annotated[int, Field(ge=1, le=_MAX_PAGE_BYTES)] = Field(
        description="The weights of an adapter take the next multiple of these bytes on each rank."
    )


class Costs(CostsPart):
    tensor: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_TENSOR)], ...], Field(strict=False)] = Field(
        min_length=1,
        max_length=_MAX_NUMBERS,
        description="Possible tensor sizes: numbers of ranks that can share a layer, ascending from 1. The lists of "
        "numbers in the other fields have one number for each of these, in this order.",
    )
    embedding: Amounts = Field(description="Weights of the first of several stages, in addition to its layers.")
    head: Amounts = Field(description="Weights of the last of several stages, in addition to its layers.")
    both: Amounts = Field(description="Weights of the stage of a model with one stage, in addition to its layers.")
    kinds: Annotated[tuple[LayerKind, ...], Field(strict=False)] = Field(
        min_length=1, max_length=_MAX_KINDS, description="The kinds of layers; the first is called a, the second b."
    )
    layers: str = Field(
        pattern=r"^(([1-9][0-9]{0,3})?[a-z])+$",
        max_length=MAX_LAYERS,
        description="The kind of each layer, run-length coded: 5ab is aaaaab.",
    )
    most_stages: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = Field(
        None, description="Largest number of pipeline stages that can share the layers; absent: the number of layers."
    )
    head_layers: float = Field(
        ge=0,
        le=_MAX_HEAD_LAYERS,
        allow_inf_nan=False,
        description="The work of the output head, as a number of layers. The last stage, which has the head, gets "
        "fewer layers to make up for this work.",
    )
    step: StepCosts = Field(description="Memory of the largest step of a rank.")
    adapters: AdapterCosts | None = Field(
        None,
        description="Memory of LoRA adapters that update all matrices that an adapter can update. Absent if no adapter "
        "can update the model.",
    )
    checkpoint_bytes: Annotated[int, Field(ge=1, le=_MAX_BYTES)] = Field(
        description="Bytes of the weights as a folder of safetensors holds them."
    )

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The runs of equal layers, in the order of the model: (number of layers, index of the kind in `kinds`)."""
        return tuple((int(number or 1), ord(letter) - ord("a")) for number, letter in _RUN.findall(self.layers))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The number of layers of each kind in `kinds`."""
        return tuple(sum(number for number, kind in self.runs if kind == at) for at in range(len(self.kinds)))

    @property
    def num_layers(self) -> int:
        return sum(self.numbers)

    @property
    def max_pipeline(self) -> int:
        """The largest number of pipeline stages that the model can have."""
        return min(self.num_layers, self.most_stages or self.num_layers)

    @cached_property
    def attention_span(self) -> int | None:
        """The largest window of all layers, in positions; None if a layer has no window."""
        windows = [kind.window for kind, number in zip(self.kinds, self.numbers, strict=True) if number]
        known = [window for window in windows if window is not None]
        return max(known) if len(known) == len(windows) else None

    @model_validator(mode="after")
    def _is_complete(self) -> Costs:
        if self.tensor[0] != 1 or sorted(set(self.tensor)) != list(self.tensor):
            raise ValueError("tensor: the numbers of ranks must ascend from 1")
        if any(kind >= len(self.kinds) for _, kind in self.runs):
            raise ValueError("layers: a letter names a kind that `kinds` does not have")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"layers: {self.num_layers} are more than {MAX_LAYERS}")
        of_kinds = [each for kind in self.kinds for each in (kind.weights, kind.kv)]
        of_adapters = [] if self.adapters is None else [self.adapters.layer]
        amounts = (self.embedding, self.head, self.both, self.step.token, *of_kinds, *of_adapters)
        lists = [numbers for each in amounts for numbers in each.lists]
        if self.adapters is not None:
            lists.append(self.adapters.token_bytes)
        if any(len(numbers) != len(self.tensor) for numbers in lists):
            raise ValueError("each list must have one number for each number in `tensor`")
        self._check_size()
        return self

    def _check_size(self) -> None:
        """Raises ValueError if the weights are too large for a model of MAX_PARAMETERS parameters."""
        for index in range(len(self.tensor)):
            ends = max(each.bytes_at(index, 1) for each in (self.embedding, self.head, self.both))
            layers = sum(
                number * kind.weights.bytes_at(index, 1) for number, kind in zip(self.numbers, self.kinds, strict=True)
            )
            if ends + layers > MAX_PARAMETERS:
                raise ValueError(f"the weights are those of a model with more than {MAX_PARAMETERS} parameters")
