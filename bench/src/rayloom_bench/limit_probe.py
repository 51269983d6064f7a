"""Measures memory bandwidth and matrix products. Run as a fresh process: job `{"threads": N}`, see child.py."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from rayloom_bench.child import report_result

BUFFER_BYTES = 512 * 1024 * 1024  # far more than any cache that a test machine has
MATMUL_M, MATMUL_N, MATMUL_K = 512, 2048, 2048
LEAST_RUNS = 3
LEAST_S = 1.0  # of measuring, so that a clock that ramps up is seen at its best


def main() -> None:
    threads = json.load(sys.stdin)["threads"]
    torch.set_num_threads(threads)
    with torch.inference_mode():
        read_bytes_s = measure_read_bytes_s()
        fp32 = measure_flop_s(torch.float32)
        bf16 = measure_flop_s(torch.bfloat16)
    report_result(
        {
            "read_bytes_s": read_bytes_s,
            "fp32_flop_s": fp32,
            "bf16_flop_s": bf16,
            "has_bf16_instructions": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }
    )


def measure_read_bytes_s() -> float:
    """Bytes per second of the fastest full read: a sum or a matrix-vector product, whichever is faster."""
    matrix = torch.ones(BUFFER_BYTES // 4 // 4096, 4096)
    vector = torch.ones(4096)
    return BUFFER_BYTES / min(best_s(lambda: matrix.sum()), best_s(lambda: matrix @ vector))


def measure_flop_s(dtype: torch.dtype) -> float:
    """Operations per second of a product of M = 512 rows, a multiply and an add counting as two."""
    rows = torch.randn(MATMUL_M, MATMUL_K).to(dtype)
    weight = torch.randn(MATMUL_N, MATMUL_K).to(dtype)
    return 2 * MATMUL_M * MATMUL_N * MATMUL_K / best_s(lambda: torch.nn.functional.linear(rows, weight))


def best_s(action: Callable[[], object]) -> float:
    """Seconds of the fastest run after one that is not counted."""
    action()
    best, total, num_runs = float("inf"), 0.0, 0
    while num_runs < LEAST_RUNS or total < LEAST_S:
        start = time.perf_counter()
        action()
        seconds = time.perf_counter() - start
        best, total, num_runs = min(best, seconds), total + seconds, num_runs + 1
    return best


if __name__ == "__main__":
    main()
