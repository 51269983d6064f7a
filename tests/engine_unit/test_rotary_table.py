"""The angles of the C library are those of torch but for the last bit of a frequency."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayloom_engine.models import rope
from rayloom_engine.models.on_library.rotary_table import RotaryTable, inverse_frequencies
from rayloom_engine.models.shape import RopeParameters

LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position": 8192,
}


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(
    "rope_of",
    [
        {"theta": 10_000.0},
        {"theta": 1_000_000.0},
        {"theta": 500_000.0, **LLAMA3},
        {"theta": 10_000.0, "kind": "linear", "factor": 4.0},
    ],
    ids=str,
)
def test_frequencies_are_those_of_torch_but_for_their_last_bits(rope_of: dict, head_dim: int) -> None:
    parameters = RopeParameters(**rope_of)
    expected = rope.inverse_frequencies(parameters, head_dim).numpy()
    ours = inverse_frequencies(parameters, head_dim)
    assert ours.dtype == np.float32 and ours.shape == (head_dim // 2,)
    np.testing.assert_array_max_ulp(ours, expected, maxulp=2)


def test_a_row_is_the_same_however_the_table_grew() -> None:
    parameters = RopeParameters(theta=10_000.0)
    small, large = RotaryTable(parameters, 64), RotaryTable(parameters, 64)
    positions = np.array([0, 1, 1023, 1024, 2999])
    small.rows(positions[:2], 2)
    rows = small.rows(positions, 3000)
    for ours, expected in zip(rows, large.rows(positions, 90_000), strict=True):
        assert ours.shape == (5, 32)
        assert np.array_equal(ours, expected)
    # The angle is rounded to float32, then its cosine and sine are computed in float64 and rounded.
    angles = torch.from_numpy(positions.astype(np.float32)[:, None] * inverse_frequencies(parameters, 64)).double()
    for ours, expected in zip(rows, (angles.cos(), angles.sin()), strict=True):
        np.testing.assert_array_max_ulp(ours, expected.float().numpy(), maxulp=1)
