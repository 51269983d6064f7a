"""ModelPart: the part of a model that one rank has. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.parallel.shard import WHOLE, Shard
from rayloom_engine.parallel.stage import Stage, whole_model


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A shard of a stage: some layers, and of each matrix some rows or columns."""

    stage: Stage
    shard: Shard = WHOLE

    def rank_in(self, stage_index: int) -> int:
        """The rank that has the same shard of another stage. Ranks of one stage have neighbouring numbers."""
        return stage_index * self.shard.count + self.shard.index


def whole_part(num_layers: int) -> ModelPart:
    """The part of a rank that holds the whole model."""
    return ModelPart(whole_model(num_layers))
