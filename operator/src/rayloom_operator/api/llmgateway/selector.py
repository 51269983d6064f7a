"""`spec.services` of an LLMGateway: a label selector, with the meaning that it has in Kubernetes.

See https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part, rules

_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_EMPTY_IN_WORDS = "an empty selector selects nothing; add a label to matchLabels or matchExpressions"
_VALUES_IN_WORDS = "In and NotIn need values; Exists and DoesNotExist take none: add the values, or remove them"
_WITH_VALUES = ("In", "NotIn")
_MAX_VALUE = 63  # characters of a label's value

_VALUE_IN_WORDS = "use at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit"


def _is_a_value(text: str) -> str:
    if len(text) > _MAX_VALUE or re.fullmatch(_VALUE, text) is None:
        raise ValueError(f"{text!r} is not allowed; {_VALUE_IN_WORDS}")
    return text


LabelValue = Annotated[
    str, AfterValidator(_is_a_value), Field(json_schema_extra={"pattern": _VALUE, "maxLength": _MAX_VALUE})
]


def _are_labels(labels: dict[str, str]) -> dict[str, str]:
    wrong = sorted(key for key in labels if re.fullmatch(_KEY, key) is None)
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: this is not the key of a label; write it as team or example.org/team")
    return labels


class Requirement(Part):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"(self.operator in {list(_WITH_VALUES)}) == (has(self.values) && size(self.values) > 0)",
                _VALUES_IN_WORDS,
            )
        )
    )

    key: str = Field(pattern=_KEY, max_length=317, description="Key of the label, such as team or example.org/team.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(
        description="In: the label has one of the values. NotIn: it has none of them, or is missing. Exists: the label "
        "is there. DoesNotExist: it is missing."
    )
    values: tuple[LabelValue, ...] = Field(
        (), strict=False, max_length=64, description="Values of the label, for In and NotIn."
    )

    @model_validator(mode="after")
    def _has_the_values_that_it_needs(self) -> Requirement:
        if (self.operator in _WITH_VALUES) != bool(self.values):
            raise ValueError(f"operator {self.operator} with {len(self.values)} values: {_VALUES_IN_WORDS}")
        return self

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Returns whether an object with these labels meets the requirement."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class ServiceSelector(Part):
    """The LLMServices of the namespace that meet every requirement."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "(has(self.matchLabels) && size(self.matchLabels) > 0) || "
                "(has(self.matchExpressions) && size(self.matchExpressions) > 0)",
                _EMPTY_IN_WORDS,
            )
        )
    )

    match_labels: Annotated[dict[str, LabelValue], AfterValidator(_are_labels)] = Field(
        default_factory=dict, max_length=32, description="Labels that a service must have, each with this value."
    )
    match_expressions: tuple[Requirement, ...] = Field(
        (), strict=False, max_length=32, description="Further requirements on the labels of a service."
    )

    @model_validator(mode="after")
    def _selects_something(self) -> ServiceSelector:
        if not self.match_labels and not self.match_expressions:
            raise ValueError(_EMPTY_IN_WORDS)
        return self

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Returns whether an LLMService with these labels is selected."""
        return self.match_labels.items() <= labels.items() and all(
            each.holds(labels) for each in self.match_expressions
        )
