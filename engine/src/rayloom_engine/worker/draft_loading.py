"""Finds and loads the draft model, and refuses a draft model that does not fit the target model."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.models.checkpoint.source import ResolvedModel, resolve
from rayloom_engine.models.int8_shape import check_groups, check_int8
from rayloom_engine.models.reading import read_model_shape
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import whole_part

if TYPE_CHECKING:
    from rayloom_engine.worker.computation import LoadedPart

logger = logging.getLogger(__name__)

_TOKENIZER = "tokenizer.json"


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
        return load_part(wanted, self.settings, num_threads, os.environ, progress)


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
        resolved = resolve(name, None, progress, keeps_blocks=keeps_blocks)
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
        raise ConfigError(f"draft_model: {name}, with its own setting draft_quantization: {error}") from error
    longest = min(config.max_model_len or target_shape.max_position_embeddings, shape.max_position_embeddings)
    settings = config.model_copy(
        update={
            "model": name,
            "revision": None,
            "model_backend": "native",
            "quantization": config.draft_quantization,
            "max_model_len": longest,
        }
    )
    return FoundDraft(folder=resolved.path, shape=shape.for_context(longest), settings=settings)


def check_draft(name: str, draft: ModelShape, target: ModelShape) -> None:
    """Raises ConfigError if the draft model cannot share the block tables of the target model.

    The vocabularies may have different numbers of rows, because the models of a family are padded to different numbers.
    The draft model proposes only token ids that both models have.
    """
    if target.attention_span is not None and (
        draft.attention_span is None or draft.attention_span > target.attention_span
    ):
        seen = "all positions" if draft.attention_span is None else f"{draft.attention_span} positions"
        raise ConfigError(
            f"draft_model: {name} attends to {seen}, but the model attends to {target.attention_span}, so earlier "
            "blocks of the KV cache are freed; use a draft model whose sliding windows are not wider"
        )


def check_tokenizers(name: str, draft: Path, target: Path) -> None:
    """Raises ConfigError if both folders have a tokenizer, and a token has another number in the draft model's."""
    files = [folder / _TOKENIZER for folder in (draft, target)]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        logger.warning(
            "draft_model: the tokenizers of %s and of the model are not compared, because there is no %s; if they "
            "differ, no draft is accepted",
            name,
            " and no ".join(missing),
        )
        return
    try:
        contents = [file.read_bytes() for file in files]
        if contents[0] == contents[1]:
            return
        in_draft, in_target = (_numbers(json.loads(content)) for content in contents)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"draft_model: the tokenizers of {name} and of the model cannot be compared ({type(error).__name__}: "
            f"{error}); use a draft model with a copy of the model's {_TOKENIZER}"
        ) from error
    different = sorted(token for token, number in in_target.items() if in_draft.get(token) != number)
    if different:
        token = different[0]
        raise ConfigError(
            f"draft_model: {name} has another tokenizer than the model: {len(different)} of the model's "
            f"{len(in_target)} tokens have another number or are missing, such as {token!r} ({in_target[token]} in the "
            f"model, {in_draft.get(token, 'missing')} in the draft model); use a draft model with the same tokenizer"
        )


def _numbers(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Returns the map: token -> number, with the added tokens. `tokenizer`: the content of a tokenizer.json."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # of a Unigram model: [token, score] in the order of numbers
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()}
    return {**vocabulary, **added}
