"""Finds and loads the draft model, and refuses a draft model that does not fit the target model."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.models.checkpoint.source import ResolvedModel, resolve
from rayloom_engine.models.draft_checks import check_draft, check_tokenizers
from rayloom_engine.models.int8_shape import check_groups, check_int8
from rayloom_engine.models.reading import read_model_shape
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import whole_part

if TYPE_CHECKING:
    from rayloom_engine.worker.computation import LoadedPart

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDraft:
    """The draft model's folder and shape, and the settings with which it is loaded."""

    folder: Path
    shape: ModelShape
    settings: EngineConfig

    def load(self, num_threads: int, progress: Progress) -> LoadedPart:
        """Loads the whole draft model. Raises ModelError or ConfigError."""
        from rayloom_engine.worker.part_loading import PartToLoad, load_part

        logger.info("draft model: %s", self.settings.model)
        wanted = PartToLoad(self.folder, self.shape, whole_part(self.shape.num_layers))
        try:
            return load_part(wanted, self.settings, num_threads, os.environ, progress)
        except ConfigError as error:
            raise _of_draft(self.settings.model, error) from error
        except ModelError as error:
            raise ModelError(f"draft_model: {error}", error.fault) from error


def find_draft(
    config: EngineConfig, target: ResolvedModel, target_shape: ModelShape, progress: Progress
) -> FoundDraft | None:
    """Returns the draft model; None if the engine has none. `target`: the model that the engine serves.

    Raises ModelError or ConfigError if the draft model cannot be used.
    """
    if config.speculation != "draft":
        return None
    name = config.draft_model
    assert name is not None, "setting_conflicts.py demands a draft model"
    try:
        keeps_blocks = config.draft_quantization == "auto" and config.dtype == "auto"
        resolved = resolve(name, config.draft_revision, progress, keeps_blocks=keeps_blocks)
        shape = read_model_shape(resolved.path, "native")
    except ModelError as error:
        raise ModelError(f"draft_model: {error}", error.fault) from error
    check_draft(name, shape, target_shape)
    check_tokenizers(name, resolved.path, target.path)
    try:
        if config.draft_quantization == "int8":
            check_int8(shape, config.dtype, 1)
        elif config.draft_quantization == "auto" and shape.scheme is not None:
            check_groups(shape, 1)
    except ConfigError as error:
        raise _of_draft(name, error) from error
    longest = min(config.max_model_len or target_shape.max_position_embeddings, shape.max_position_embeddings)
    settings = config.model_copy(
        update={
            "model": name,
            "revision": config.draft_revision,
            "model_backend": "native",
            "quantization": config.draft_quantization,
            "max_model_len": longest,
        }
    )
    return FoundDraft(folder=resolved.path, shape=shape.for_context(longest), settings=settings)


def _of_draft(name: str, error: ConfigError) -> ConfigError:
    """Returns an error about the setting `quantization` of the draft model, with this setting's name in the engine."""
    return ConfigError(f"draft_model: {name}, with its own setting draft_quantization: {error}")
