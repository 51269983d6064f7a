"""The layers of each pipeline stage: a copy of the engine's split, held to it by a contract test. Pure.

The engine's inspection gives the layers and the head's weight in layers, but not a split for each number of stages: a
model of a thousand layers has a thousand of them, and a termination message holds 4,096 bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# Layers by which the best split may differ from the even one: for whole numbers of layers and rounding of floats.
_NEAR = 3


class Stages(NamedTuple):
    """Numbers of layers of the stages that differ, 0 where there is none of a kind; equal stages are listed once."""

    only: int = 0  # has the embedding, the final norm and the head
    first: int = 0  # has the embedding
    longer: int = 0
    shorter: int = 0
    last: int = 0  # has the final norm and the head


def split_layers(num_layers: int, num_stages: int, head_layers: float) -> tuple[int, ...]:
    """Layers of each stage: as even as can be, but the last has less where its head would make it the slowest.

    `head_layers` is the head's work in layers; `num_stages` is at most `num_layers`.
    """
    if num_stages == 1:
        return (num_layers,)
    num_last = _num_last_layers(num_layers, num_stages, head_layers)
    least, num_longer = divmod(num_layers - num_last, num_stages - 1)
    # The first stage has the embedding, so it is never one of the longer ones.
    return (*(least + (1 <= stage <= num_longer) for stage in range(num_stages - 1)), num_last)


def stages(num_layers: int, num_stages: int, head_layers: float) -> Stages:
    """The stages of `split_layers` that differ, without a list of all of them."""
    if num_stages == 1:
        return Stages(only=num_layers)
    num_last = _num_last_layers(num_layers, num_stages, head_layers)
    least, num_longer = divmod(num_layers - num_last, num_stages - 1)
    longer = least + 1 if num_longer else 0
    shorter = least if num_longer < num_stages - 2 else 0
    return Stages(first=least, longer=longer, shorter=shorter, last=num_last)


def _num_last_layers(num_layers: int, num_stages: int, head_layers: float) -> int:
    """Layers of the last of two or more stages: the number whose slowest stage is fastest, the largest of equal ones.

    A larger number makes the last stage slower and the others faster. So only numbers near the one where both take the
    same time are compared: a model of a thousand layers is split in each possible way within one reconcile.
    """
    most = num_layers // num_stages
    equal = math.floor((num_layers - head_layers * (num_stages - 1)) / num_stages)
    best = 1
    fastest = math.inf
    for num_last in range(min(max(1, equal - _NEAR), most), min(max(1, equal + _NEAR), most) + 1):
        slowest = max(-(-(num_layers - num_last) // (num_stages - 1)), num_last + head_layers)
        if slowest <= fastest:
            best = num_last
            fastest = slowest
    return best
