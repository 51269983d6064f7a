"""Measures memory bandwidth and matrix products in a fresh process. Its job on stdin: `{"threads": N}` (child.py)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from rayloom_bench.child import report_result

BUFFER_BYTES = 512 * 1024 * 1024  # bytes; far more than the processor caches of any test machine
MATMUL_M = 512
MATMUL_N = 2048
MATMUL_K = 2048
MIN_RUNS = 3
MIN_S = 1.0  # least seconds of all runs together; after this time the cores run at their highest clock rate


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
    """Memory bandwidth in bytes per second: the faster of two full reads, a sum and a matrix-vector product."""
    matrix = torch.ones(BUFFER_BYTES // 4 // 4096, 4096)
    vector = torch.ones(4096)
    return BUFFER_BYTES / min(best_s(lambda: matrix.sum()), best_s(lambda: matrix @ vector))


def measure_flop_s(dtype: torch.dtype) -> float:
    """FLOP/s of a product with M = 512 rows. A multiplication and an addition count as two operations."""
    rows = torch.randn(MATMUL_M, MATMUL_K).to(dtype)
    weight = torch.randn(MATMUL_N, MATMUL_K).to(dtype)
    return 2 * MATMUL_M * MATMUL_N * MATMUL_K / best_s(lambda: torch.nn.functional.linear(rows, weight))


def best_s(action: Callable[[], object]) -> float:
    """Seconds of the fastest of at least MIN_RUNS runs, after one run that is not counted."""
    action()
    runs_s: list[float] = []
    while len(runs_s) < MIN_RUNS or sum(runs_s) < MIN_S:
        start_s = time.perf_counter()
        action()
        runs_s.append(time.perf_counter() - start_s)
    return min(runs_s)


if __name__ == "__main__":
    main()
