"""Types of settings with a check of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field


def _has_no_blanks_around(model: str) -> str:
    if model != model.strip():
        raise ValueError("remove the blanks around the model's name")
    return model


def _ray_can_count(amounts: dict[str, float]) -> dict[str, float]:
    for name, amount in amounts.items():
        if amount != round(amount, 4):
            raise ValueError(f"Ray counts in steps of 0.0001; for {name} use {round(amount, 4)}")
    return amounts


ModelSource = Annotated[str, Field(min_length=1), AfterValidator(_has_no_blanks_around)]
RayResources = Annotated[
    dict[str, Annotated[float, Field(ge=0.0001, allow_inf_nan=False)]],
    Field(min_length=1),
    AfterValidator(_ray_can_count),
]
