"""The machine's limits for the C library: memory bandwidth, and the FLOP/s of its product of large matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayloom_bench.limit_probe import MATMUL_K, MATMUL_M, MATMUL_N, best_s, measure_read_bytes_s
from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, ElementType, copy_elements
from rayloom_engine.cpu_library.library import CpuLibrary, linear_of


@dataclass(frozen=True, slots=True)
class Limits:
    read_bytes_s: float
    flop_s: float


def measure(library: CpuLibrary, dtype: ElementType, *, is_int8: bool) -> Limits:
    """Measures bandwidth with torch's threads and FLOP/s with the library's, each as the fastest of several runs."""
    plain = _random(MATMUL_N, dtype)
    if is_int8:
        int8 = library.pack_int8(plain)
        matrix = linear_of(int8.packed_NK, None, int8.scales_N)
    else:
        packed = library.pack(plain)
        matrix = linear_of(packed, None)
    x = _random(MATMUL_M, library.operand_dtype(dtype))
    seconds = best_s(lambda: library.multiply(dtype, matrix, x))
    return Limits(measure_read_bytes_s(), 2 * MATMUL_M * MATMUL_N * MATMUL_K / seconds)


def _random(num_rows: int, dtype: ElementType) -> Array:
    """Normal numbers, [num_rows, MATMUL_K]."""
    drawn: Array = np.random.default_rng(0).standard_normal((num_rows, MATMUL_K), dtype=np.float32)
    numbers = np.empty(drawn.shape, dtype=ELEMENTS[dtype])
    copy_elements(numbers, drawn)
    return numbers
