"""examples/facts/ holds what `rayloom-engine inspect` says of the models of the GPU examples, so that `plan` needs no
network.

The numbers are those of the models' published config.json files; the engine reads them here as it would there.
"""

import json
from pathlib import Path

import pytest

from rayloom_engine.models.checkpoint.source import ResolvedModel
from rayloom_engine.models.inspection import facts
from rayloom_engine.models.shape import read_shape
from rayloom_operator.api.model_facts import ModelFacts

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "facts"
QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
CONFIGS = {
    "qwen3-8b": QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    "qwen2.5-72b": QWEN
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "max_position_embeddings": 32768,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
}
# As the models' cards count them.
PARAMETERS = {"qwen3-8b": 8_190_735_360, "qwen2.5-72b": 72_706_203_648}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_facts_are_what_the_engine_reads_from_the_published_config(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    said = facts(ResolvedModel(path=tmp_path, source="", commit=None), read_shape(tmp_path)).text()

    assert json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) == json.loads(said)
    assert ModelFacts.model_validate_json(said).num_parameters == PARAMETERS[name]


def test_these_are_all():
    assert {path.stem for path in FOLDER.iterdir()} == set(CONFIGS)
