"""Frequencies and scales of rotary embedding equal those of transformers; also the tables of the C library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rayloom_engine.models.on_library.rotary_table import RotaryTable
from rayloom_engine.models.rope.frequencies import attention_scale, inverse_frequencies
from rayloom_engine.models.rope.parameters import ROPE_KINDS, RopeParameters
from rayloom_engine.models.shape import read_shape
from rt_lazy import LazyModule
from rt_rope import FACTORS, LLAMA3, ROPES, YARN, config_folder

transformers = LazyModule("transformers")
rope_utils = LazyModule("transformers.modeling_rope_utils")


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_scales_are_those_of_transformers(name: str, head_dim: int, tmp_path: Any) -> None:
    scaling: dict[str, Any] = dict(ROPES[name])
    for field, factors in FACTORS.items():
        if field in scaling:
            scaling[field] = [factors(pair) for pair in range(head_dim // 2)]
    shape = read_shape(config_folder(tmp_path, head_dim=head_dim, rope_parameters=scaling))
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters=dict(scaling),
    )
    context = shape.max_position_embeddings
    kind = scaling["rope_type"]
    expected, scale = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=context)
    ours = inverse_frequencies(shape.rope, head_dim)
    assert ours.dtype == np.float32
    # The blend of yarn contains a difference of two numbers. The relative rounding error of a difference is larger.
    np.testing.assert_allclose(ours, expected.numpy(), rtol=2e-6 if kind == "yarn" else 3e-7)
    assert attention_scale(shape.rope) == pytest.approx(scale, rel=1e-12)


def test_every_kind_is_compared() -> None:
    assert {scaling["rope_type"] for scaling in ROPES.values()} == set(ROPE_KINDS) - {"default"}


def test_frequencies_without_scaling_are_powers_of_theta() -> None:
    found = inverse_frequencies(RopeParameters(theta=10_000.0), 8)
    np.testing.assert_allclose(found, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    halved = inverse_frequencies(RopeParameters(theta=10_000.0, kind="linear", factor=2.0), 8)
    np.testing.assert_allclose(halved, [0.5, 0.05, 0.005, 0.0005], rtol=1e-6)
    partial = inverse_frequencies(RopeParameters(theta=10_000.0, rotated_share=0.5), 8)
    np.testing.assert_allclose(partial, [1.0, 0.01], rtol=1e-6)


def test_the_served_context_decides_for_all_tokens_of_an_engine(tmp_path: Any) -> None:
    """For `longrope` the served context decides if the long factors are used, for `dynamic` it decides the scale."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 1024, **factors}
    shape = read_shape(config_folder(tmp_path, head_dim=16, rope_parameters=scaling))
    assert shape.max_position_embeddings == 4096
    short, long = (inverse_frequencies(shape.for_context(length).rope, 16) for length in (1024, 1025))
    np.testing.assert_allclose(short, 4 * long, rtol=1e-6)
    assert attention_scale(shape.for_context(1024).rope) == attention_scale(shape.rope)

    scaling = {"rope_type": "dynamic", "factor": 2.0}
    shape = read_shape(config_folder(tmp_path, head_dim=16, rope_parameters=scaling))
    assert shape.max_position_embeddings == 8192
    unscaled = inverse_frequencies(RopeParameters(theta=shape.rope.theta), 16)
    np.testing.assert_array_equal(inverse_frequencies(shape.for_context(4096).rope, 16), unscaled)
    assert (inverse_frequencies(shape.for_context(4097).rope, 16) <= unscaled).all()
    assert inverse_frequencies(shape.rope, 16)[-1] < inverse_frequencies(shape.for_context(5000).rope, 16)[-1]


@pytest.mark.parametrize(
    ("max_position_embeddings", "served"),
    [(32_768, 131_072), (40_960, 131_072), (131_072, 131_072), (150_000, 150_000)],
)
def test_yarn_serves_the_stretched_context_whichever_length_the_config_gives(
    max_position_embeddings: int, served: int, tmp_path: Any
) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    folder = config_folder(tmp_path, rope_scaling=scaling, max_position_embeddings=max_position_embeddings)
    assert read_shape(folder).max_position_embeddings == served


@pytest.mark.parametrize("scaling", [{}, YARN, LLAMA3], ids=str)
def test_a_row_is_the_same_however_the_table_grew(scaling: dict[str, Any], tmp_path: Any) -> None:
    parameters = read_shape(config_folder(tmp_path, rope_parameters=scaling)).rope
    small, large = RotaryTable(parameters, 64), RotaryTable(parameters, 64)
    positions = np.array([0, 1, 1023, 1024, 2999])
    small.rows(positions[:2], 2)
    rows = small.rows(positions, 3000)
    for ours, expected in zip(rows, large.rows(positions, 90_000), strict=True):
        assert ours.shape == (5, 32)
        assert np.array_equal(ours, expected)
    # The table rounds the angle to float32, computes cosine and sine in float64, and then scales and rounds them.
    angles = torch.from_numpy(positions.astype(np.float32)[:, None] * inverse_frequencies(parameters, 64)).double()
    scale = attention_scale(parameters)
    assert (scale == 1.0) == (scaling is not YARN)
    for ours, expected in zip(rows, (angles.cos() * scale, angles.sin() * scale), strict=True):
        np.testing.assert_array_max_ulp(ours, expected.float().numpy(), maxulp=1)
