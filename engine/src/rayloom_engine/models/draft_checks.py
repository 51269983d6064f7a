"""Refuses a draft model that does not fit the target model. Reads shapes and tokenizers, and no weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from rayloom_engine.errors import ConfigError
from rayloom_engine.models.checkpoint.source import TOKENIZER
from rayloom_engine.models.shape import ModelShape

logger = logging.getLogger(__name__)

_SHOWN = 40  # characters of a token in a message


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
    files = [folder / TOKENIZER for folder in (draft, target)]
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
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"draft_model: the tokenizers of {name} and of the model cannot be compared ({type(error).__name__}: "
            f"{error}); use a draft model with a copy of the model's {TOKENIZER}"
        ) from error
    different = sorted(token for token, number in in_target.items() if in_draft.get(token) != number)
    if different:
        token = different[0]
        shown = token if len(token) <= _SHOWN else f"{token[:_SHOWN]}..."
        raise ConfigError(
            f"draft_model: {name} has another tokenizer than the model: {len(different)} of the model's "
            f"{len(in_target)} tokens have another number or are missing, such as {shown!r} ({in_target[token]} in the "
            f"model, {in_draft.get(token, 'missing')} in the draft model); use a draft model with the same tokenizer"
        )


def _numbers(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Returns the map: token -> number, with the added tokens. `tokenizer`: the content of a tokenizer.json."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # of a Unigram model: [token, score] in the order of numbers
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()}
    return {**vocabulary, **added}
