"""The setting model_backend "auto" for models of a native architecture that the native decoder cannot compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayloom_engine.errors import ModelError
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.reading import read_model_shape
from rt_architecture_checks import PROMPTS
from rt_architectures import ARCHITECTURES, TinyArchitecture, architecture_checkpoint, greedy_tokens
from rt_one_rank import OneRank, greedy


@pytest.mark.parametrize(
    ("model_type", "value", "sentence"),
    [
        ("olmoe", {"clip_qkv": 0.5}, "clip_qkv 0.5 is not supported; works: null"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias false is not supported; works: true"),
    ],
)
def test_auto_serves_a_model_with_a_value_that_native_refuses_by_transformers_and_logs_why(
    model_type: str, value: dict[str, object], sentence: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**ARCHITECTURES[model_type].settings, "num_hidden_layers": 2, **value}
    folder = architecture_checkpoint(tmp_path, TinyArchitecture(model_type, settings))
    with pytest.raises(ModelError, match=f"config.json: {sentence}$"):
        read_model_shape(folder, "native")
    rank = OneRank(folder)
    assert isinstance(rank.shape, MeasuredShape) and rank.shape.not_native == sentence
    assert f"native refuses it: {sentence}" in caplog.text
    assert greedy(rank.engine(), PROMPTS[:2], 8) == [tokens[:8] for tokens in greedy_tokens(folder, PROMPTS[:2])]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ModelError, match=rf"native: {sentence}. transformers: .* the checkpoint is quantised"):
        read_model_shape(folder)
