"""Common parts of the API's models: their base class, CEL rules, quantities and other types of fields."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from rayloom_operator.texts import head

# Kubernetes' quantities, but without signs and exponents:
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
_DECIMAL = {"m": Fraction(1, 1000)} | {unit: Fraction(1000**power) for power, unit in enumerate("kMGTPE", 1)}
_BINARY = {f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", 1)}
_FACTORS = {"": Fraction(1)} | _DECIMAL | _BINARY

MAX_MESSAGE = 4096  # characters of a message in a status
Quantity = Annotated[str, Field(pattern=_QUANTITY, max_length=40)]


def _cut(text: object) -> object:
    return head(text, MAX_MESSAGE) if isinstance(text, str) else text


# A message in a status. The text is cut to the length that the CRD allows, because parts of it may come from an engine.
Message = Annotated[str, BeforeValidator(_cut), Field(max_length=MAX_MESSAGE)]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)


class StatusPart(BaseModel):
    # Unknown fields are ignored: an operator of another version may have written the status.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, alias_generator=to_camel, populate_by_name=True)


def rules(*pairs: tuple[str, str]) -> JsonDict:
    """Returns the part of a schema with CEL rules. Each pair is a rule, and the API server's message if the rule fails.

    Syntax: https://kubernetes.io/docs/reference/using-api/cel/.
    """
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def amount(quantity: Quantity) -> int:
    """Returns a quantity as a whole number; for memory, in bytes: 80Gi gives 85899345920."""
    return int(number_of(quantity))


def number_of(quantity: Quantity) -> Fraction:
    """Returns a quantity as an exact number: 500m gives 1/2, and 1300m equals 1.3."""
    number, unit = re.fullmatch(r"([0-9.]+)(.*)", quantity).groups()  # type: ignore[union-attr]
    return Fraction(number) * _FACTORS[unit]


def no_nulls(value: Any, path: str = "") -> Any:
    """Returns `value` unchanged. `path` is the name of `value` in messages.

    Raises ValueError if a map or list in `value` has a null: the API server would silently drop some nulls, and keep
    others.
    """
    pairs: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        pairs = [(f"{path}.{key}".lstrip("."), each) for key, each in value.items()]
    elif isinstance(value, list):
        pairs = [(f"{path}[{number}]", each) for number, each in enumerate(value)]
    for where, each in pairs:
        if each is None:
            raise ValueError(
                f"{where} is empty; give it a value, or remove it: an empty value restores no default here"
            )
        no_nulls(each, where)
    return value


# A map whose fields are checked by Kubernetes, and not by the operator.
Free = Annotated[dict[str, Any], AfterValidator(no_nulls)]
# For the schema of a list: server-side apply merges two lists by the names of their elements.
MAP_BY_NAME: JsonDict = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
