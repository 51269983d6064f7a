"""Configurations of published models, the tool that writes the operator's facts from them, and random shapes."""

import importlib.util
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from rayloom_engine.models.checkpoint import limits
from rayloom_engine.models.rope.parameters import RopeParameters
from rayloom_engine.models.shape import ModelShape, read_shape

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tools" / "model_configs"


def load_tool():
    """tools/write_facts.py as a module."""
    spec = importlib.util.spec_from_file_location("write_facts", ROOT / "tools" / "write_facts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shape_of(name):
    """The shape that the engine reads from tools/model_configs/NAME.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
        return read_shape(Path(folder))


def make_shape(**changes):
    settings = {
        "architecture": "MistralForCausalLM",
        "num_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 15,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 33,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope": RopeParameters(),
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tie_word_embeddings": False,
        "checkpoint_dtype": "bfloat16",
        "eos_token_ids": (),
    } | changes
    return ModelShape(**({"layer_windows": (None,) * settings["num_layers"]} | settings))


@st.composite
def shapes(draw):
    """A hypothesis strategy for every shape that the engine accepts."""
    num_layers = draw(st.integers(1, limits.MAX_LAYERS))
    num_kv_heads = draw(st.integers(1, 64))
    window = draw(st.none() | st.integers(1, limits.MAX_POSITIONS))
    period = draw(st.integers(1, 9))
    shape = make_shape(
        num_layers=num_layers,
        layer_windows=tuple(None if layer % period else window for layer in range(num_layers)),
        hidden_size=draw(st.integers(1, limits.MAX_SIZE)),
        intermediate_size=draw(st.integers(1, limits.MAX_SIZE)),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.integers(1, limits.MAX_HEADS // num_kv_heads)),
        head_dim=2 * draw(st.integers(1, 1024)),
        vocab_size=draw(st.integers(1, limits.MAX_VOCAB)),
        o_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
    )
    if shape.num_parameters > limits.MAX_PARAMETERS:
        one = {"num_layers": 1, "layer_windows": shape.layer_windows[:1]}
        shape = replace(shape, **one, hidden_size=64, intermediate_size=64)
    return shape
