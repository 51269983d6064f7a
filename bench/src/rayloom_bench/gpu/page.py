"""Formats the figures of `bench gpu` as tables of a page. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rayloom_bench.gpu.kernels import KernelTime
from rayloom_bench.gpu.limits import GpuLimits
from rayloom_bench.gpu.steps import DecodeTime, EngineTime, PrefillTime
from rayloom_bench.markdown import number, table

_MOST_KERNELS = 10
_NAME_LENGTH = 60


def limits_text(limits: GpuLimits) -> str:
    return (
        f"Limits of the {limits.name} in the same run: {limits.bytes_per_s / 1e12:.2f} TB/s (a copy, bytes read and "
        f"written), {limits.flop_per_s / 1e12:.0f} TFLOP/s (a product of 8192 x 8192 matrices in bfloat16)."
    )


def decode_table(times: Sequence[DecodeTime], limits: GpuLimits) -> str:
    """A row for each step.

    The last column is the time to read weights and KV at full bandwidth, divided by the time of the step.
    """
    return table(
        ("sequences", "context", "CUDA graph", "ms of a step", "tok/s", "share of the memory's limit"),
        (
            (
                str(each.batch_size),
                f"{each.context_len:,}",
                "yes" if each.has_graph else "no",
                number(1e3 * each.step_s),
                f"{each.batch_size / each.step_s:,.0f}",
                f"{each.read_bytes / limits.bytes_per_s / each.step_s:.0%}",
            )
            for each in times
        ),
    )


def prefill_table(times: Sequence[PrefillTime], limits: GpuLimits) -> str:
    return table(
        ("prompt tokens", "ms", "tok/s", "TFLOP/s", "share of the product's limit"),
        (
            (
                f"{each.num_tokens:,}",
                number(1e3 * each.seconds),
                f"{each.num_tokens / each.seconds:,.0f}",
                f"{each.flops / each.seconds / 1e12:.0f}",
                f"{each.flops / each.seconds / limits.flop_per_s:.0%}",
            )
            for each in times
        ),
    )


def engine_table(times: Sequence[EngineTime]) -> str:
    return table(
        ("sequences", "ms of a step", "of it outside forward pass and sampler", "tok/s"),
        (
            (
                str(each.batch_size),
                number(1e3 * each.step_s),
                f"{1 - each.compute_s / each.step_s:.1%}",
                f"{each.tokens_per_s:,.0f}",
            )
            for each in times
        ),
    )


def kernel_table(times: Sequence[KernelTime]) -> str:
    total = sum(each.us for each in times) or 1.0
    return table(
        ("kernel", "calls", "us", "share"),
        (
            (f"`{each.name[:_NAME_LENGTH]}`", str(each.calls), number(each.us), f"{each.us / total:.0%}")
            for each in times[:_MOST_KERNELS]
        ),
    )
