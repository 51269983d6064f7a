"""Stage: the layers of the model that belong to a pipeline stage. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from rayloom_engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` consecutive parts of the model. With tensor parallelism, several ranks share a stage."""

    index: int
    count: int
    layers: range  # indices of its layers in the whole model

    @property
    def is_first(self) -> bool:
        """True for the stage that has the embedding and reads token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that has the final norm and the head, and chooses tokens."""
        return self.index == self.count - 1


def whole_model(num_layers: int) -> Stage:
    """Returns the only stage of a model that is not split."""
    return Stage(0, 1, range(num_layers))


def make_stages(num_layers: int, num_stages: int, head_layers: float = 0.0) -> tuple[Stage, ...]:
    """Returns all stages of a model. Arguments and errors are those of `split_layers`."""
    parts = split_layers(num_layers, num_stages, head_layers)
    return tuple(Stage(index, num_stages, layers) for index, layers in enumerate(parts))


def split_layers(num_layers: int, num_stages: int, head_layers: float = 0.0) -> tuple[range, ...]:
    """Returns the layers of each stage, as even as possible. Raises ConfigError for more stages than layers.

    The last stage also has the head, which costs as much as `head_layers` layers. The last stage has fewer layers than
    the others if this makes the slowest stage faster, and it never has more layers than another stage. If the layers of
    the other stages do not divide evenly, the first stage and possibly further stages have one layer fewer.
    """
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"pipeline_parallel_size: {num_stages} stages cannot share {num_layers} layers, because each needs one; "
            f"use 1 to {num_layers}"
        )
    if num_stages == 1:
        return (range(num_layers),)

    def slowest(num_last: int) -> float:
        return max(-(-(num_layers - num_last) // (num_stages - 1)), num_last + head_layers)

    num_last = min(range(num_layers // num_stages, 0, -1), key=slowest)
    least, num_longer = divmod(num_layers - num_last, num_stages - 1)
    longer = [*range(1, num_stages - 1), 0][:num_longer]
    sizes = [least + (index in longer) for index in range(num_stages - 1)]
    ends = [0, *accumulate([*sizes, num_last])]
    return tuple(range(start, end) for start, end in pairwise(ends))
