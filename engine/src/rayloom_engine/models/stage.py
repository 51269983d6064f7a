"""Which layers of the model a pipeline stage has. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from rayloom_engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` parts of the model, in order. A rank holds one; with tensor parallelism several share it."""

    index: int
    count: int
    layers: range  # of the whole model's layers

    @property
    def is_first(self) -> bool:
        """It has the embedding and takes token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It has the final norm and the head, and chooses tokens."""
        return self.index == self.count - 1


def whole_model(num_layers: int) -> Stage:
    return Stage(0, 1, range(num_layers))


def make_stages(num_layers: int, num_stages: int) -> tuple[Stage, ...]:
    """All stages of a model. Raises ConfigError as `split_layers`."""
    return tuple(Stage(index, num_stages, layers) for index, layers in enumerate(split_layers(num_layers, num_stages)))


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage: as even as can be, and the ends are lighter when it is not even.

    The last stage has the head, a matrix as large as several layers of a small model, so it never gets a layer more
    than another; the first stage is the next to be spared. Raises ConfigError for more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"pipeline_parallel_size: {num_stages} stages cannot share {num_layers} layers, because each needs one; "
            f"use 1 to {num_layers}"
        )
    least, num_longer = divmod(num_layers, num_stages)
    longer = [*range(1, num_stages - 1), 0][:num_longer]
    ends = [0]
    for index in range(num_stages):
        ends.append(ends[-1] + least + (index in longer))
    return tuple(range(start, end) for start, end in pairwise(ends))
