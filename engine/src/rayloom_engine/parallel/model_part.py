"""ModelPart: the part of a model that one rank holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.parallel.shard import WHOLE, Shard
from rayloom_engine.parallel.stage import Stage, whole_model


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A shard of a stage: some of the layers, and some rows or columns of each of their matrices."""

    stage: Stage
    shard: Shard = WHOLE

    def rank_in(self, stage_index: int) -> int:
        """Returns the rank that holds the same shard of another stage. Ranks of a stage have consecutive numbers."""
        return stage_index * self.shard.count + self.shard.index


def whole_part(num_layers: int) -> ModelPart:
    """Returns the part for a rank that holds the whole model."""
    return ModelPart(whole_model(num_layers))
