"""Prompts of embeddings whose rows are those of a checkpoint's own embedding matrix, so the answers are known."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from rayloom_engine.core.embeds import EmbeddedPrompt, Embeds, EmbedsType

_DTYPES: dict[EmbedsType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class EmbeddingRows:
    """The embedding matrix of a tiny checkpoint."""

    def __init__(self, folder: Path | str, scale: float = 1.0) -> None:
        """`scale`: factor of the rows, as in the embedding module of transformers."""
        weights = load_file(Path(folder) / "model.safetensors")
        self.matrix_VD = weights["model.embed_tokens.weight"].float() * scale

    def of(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self.matrix_VD[torch.tensor(list(token_ids))]

    def prompt(self, token_ids: Sequence[int]) -> EmbeddedPrompt:
        return prompt_of(self.of(token_ids))


def prompt_of(rows_TD: torch.Tensor, dtype: EmbedsType = "float32") -> EmbeddedPrompt:
    stored = rows_TD.to(_DTYPES[dtype]).contiguous().view(torch.uint8)
    return EmbeddedPrompt(Embeds(dtype, rows_TD.shape[1], stored.numpy().tobytes()))


def saved(value: object, **options: object) -> bytes:
    """The file that torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def field_of(rows_TD: torch.Tensor) -> str:
    """The field `prompt_embeds`."""
    return base64.b64encode(saved(rows_TD)).decode()
