"""The C library's conversions of numpy arrays: rounding to bfloat16 equals torch's; and the other conversions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.cpu_library import arrays
from rayloom_engine.cpu_library.arrays import ELEMENTS, address, are_finite, copy_elements, widened

BFLOAT16 = ELEMENTS["bfloat16"]
WORDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


def rounded(values: np.ndarray) -> np.ndarray:
    out = np.empty(values.shape, dtype=BFLOAT16)
    copy_elements(out, values)
    return out


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F807FFF, 0x3F80),  # just below halfway
        (0x3F808000, 0x3F80),  # halfway, rounded to the even neighbour below
        (0x3F808001, 0x3F81),
        (0x3F818000, 0x3F82),  # halfway, rounded to the even neighbour above
        (0x7F7FFFFF, 0x7F80),  # the largest float32 becomes infinity
        (0xFF800000, 0xFF80),  # -infinity
        (0x00000001, 0x0000),
        (0x80000000, 0x8000),  # -0
    ],
)
def test_numbers_are_rounded_to_the_nearest_bfloat16(bits: int, expected: int) -> None:
    assert rounded(np.array([bits], dtype=np.uint32).view(np.float32)).tolist() == [expected]


@settings(max_examples=200, deadline=None)
@given(words=WORDS)
def test_every_number_is_rounded_as_torch_rounds_it_and_a_nan_stays_one(words: list[int]) -> None:
    values = np.array(words, dtype=np.uint32).view(np.float32)
    expected = torch.from_numpy(values).bfloat16()
    ours = torch.from_numpy(rounded(values)).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.nan_to_num(), expected.nan_to_num())


def test_a_nan_whose_upper_bits_are_those_of_an_infinity_stays_a_nan() -> None:
    assert rounded(np.array([0x7F800001, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)).tolist() == [0x7FC0, 0xFFFF]


@pytest.mark.parametrize("out_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(7,), (50, 3), (1, 40)])
def test_parts_of_every_type_are_converted_as_torch_converts_them(
    sizes: tuple[int, ...], dtype: torch.dtype, out_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_COPIED_ELEMENTS", 20)  # several pieces
    stored = (torch.randn(*sizes, 2, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)[..., 0]
    whole = stored.contiguous()
    values = (whole.view(torch.uint16) if dtype is torch.bfloat16 else whole).numpy()
    apart = np.empty((*sizes, 2), dtype=values.dtype)[..., 0]  # the columns of a shard are not contiguous
    apart[...] = values
    out = np.zeros(sizes, dtype=ELEMENTS[out_type])
    copy_elements(out, apart)
    expected = stored.to(getattr(torch, out_type))
    assert torch.equal(torch.from_numpy(out).view(expected.dtype), expected)


def test_a_vector_is_widened_into_a_copy() -> None:
    vector = np.array([1.5, -2.0], dtype=np.float32)
    copy = widened(vector)
    copy[0] = 7.0
    assert vector.tolist() == [1.5, -2.0]
    assert widened(rounded(vector)).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found(bad: float) -> None:
    values = np.full((3, 5), 3e38, dtype=np.float32)
    assert are_finite(values) and are_finite(rounded(values))
    values[1, 4] = bad
    assert not are_finite(values) and not are_finite(rounded(values))


def test_an_array_that_is_not_contiguous_has_no_address() -> None:
    values = np.zeros((4, 4), dtype=np.float32)
    assert address(values) == values.ctypes.data
    with pytest.raises(TypeError, match="contiguous"):
        address(values[:, 1])
