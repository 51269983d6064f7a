"""Shapes of published models, and random shapes."""

import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from published_models import config_path
from rayloom_engine.models.checkpoint import limits
from rayloom_engine.models.rope.parameters import RopeParameters
from rayloom_engine.models.shape import ModelShape, read_shape

# All fields of these models' shapes are compared. tests/contract/test_published_sizes.py compares the sizes of many
# more models.
WELL_KNOWN = (
    "llama-3.1-8b",
    "llama-3.1-70b",
    "mistral-7b-v0.3",
    "qwen2.5-72b",
    *(f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")),
)


def shape_of(name, *, is_dense=False):
    """The shape that the engine reads from a model's config.json in tools/model_configs/.

    `is_dense`: the shape as if quantised weights were dense. On a GPU, ranks make them dense.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config_path(name).read_bytes())
        shape = read_shape(Path(folder))
    return replace(shape, scheme=None) if is_dense else shape


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
