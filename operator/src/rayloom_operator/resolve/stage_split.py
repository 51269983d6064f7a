"""The number of layers of each pipeline stage. A contract test checks that the engine splits in the same way. Pure.

The operator computes the split itself, because the inspection cannot return a split for each number of stages. A model
with a thousand layers has a thousand splits, and the inspection's result must fit into a termination message of 4,096
bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# The largest difference between the last stage's best number of layers and the number that balances all stages. The two
# numbers differ because a stage has a whole number of layers, and because floats are rounded.
_NEAR = 3


class Stages(NamedTuple):
    """The number of layers in each kind of stage; 0 if there is no such stage. A stage in the middle has `longer` or
    `shorter` layers."""

    only: int = 0  # layers of a single stage, which has the embedding, the final norm and the head
    first: int = 0  # layers of the first stage, which has the embedding
    longer: int = 0
    shorter: int = 0
    last: int = 0  # layers of the last stage, which has the final norm and the head


def split_layers(num_layers: int, num_stages: int, head_layers: float) -> tuple[int, ...]:
    """Returns the number of layers of each stage: as even as possible, but fewer for the last stage, which has the
    head.

    `head_layers`: the head's work, as a number of layers with equal work. `num_stages` is at most `num_layers`.
    """
    if num_stages == 1:
        return (num_layers,)
    num_last = _num_last_layers(num_layers, num_stages, head_layers)
    least, num_longer = divmod(num_layers - num_last, num_stages - 1)
    # The first stage has the embedding too, so it never gets an additional layer.
    return (*(least + (1 <= stage <= num_longer) for stage in range(num_stages - 1)), num_last)


def stages(num_layers: int, num_stages: int, head_layers: float) -> Stages:
    """Returns the different stages of `split_layers`, without building the list of all stages."""
    if num_stages == 1:
        return Stages(only=num_layers)
    num_last = _num_last_layers(num_layers, num_stages, head_layers)
    least, num_longer = divmod(num_layers - num_last, num_stages - 1)
    longer = least + 1 if num_longer else 0
    shorter = least if num_longer < num_stages - 2 else 0
    return Stages(first=least, longer=longer, shorter=shorter, last=num_last)


def _num_last_layers(num_layers: int, num_stages: int, head_layers: float) -> int:
    """Returns how many layers the last of several stages gets, so that the slowest stage is as fast as possible.

    If several numbers are equally good, the function returns the largest. A larger number makes the last stage slower
    and the other stages faster. So the best numbers are near the number at which all stages take equally long. Only
    numbers near that number are tried. The function has to be fast: one reconcile may split a model of a thousand
    layers into every possible number of stages.
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
