"""Launches of the kernels that choose tokens.

A step in which every row is greedy takes two launches. Other steps take two to four further launches: one for bans and
biases, if there are any; one for masks, penalties and temperature; one for thresholds, if a row has any; and one for
the draw.

Legend: N rows of logits, M of these rows that are not simply greedy, V vocabulary, B blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rayloom_engine.kernels.sampling import NUM_FLOATS, NUM_INTS, Rows
from rayloom_engine.kernels.sampling.triton_kernels import (
    add_kernel,
    adjust_kernel,
    draw_kernel,
    reduce_kernel,
    scan_kernel,
)
from rayloom_engine.kernels.sampling.triton_logprobs import logprobs_kernel
from rayloom_engine.kernels.sampling.triton_thresholds import thresholds_kernel
from rayloom_engine.kernels.triton.launch import num_blocks, power_of_two
from rayloom_engine.kernels.triton.shipped import Shipped

_ENTRIES = 256  # entries of a program of add_kernel
_NUM_WARPS = {"thresholds": 8, "logprobs": 8}  # of kernels that read a whole row with one program; others have 4
_LAST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks into which a row of logits is cut."""

    size: int = 1024  # tokens of a block

    def count(self, vocab_size: int) -> int:
        return num_blocks(vocab_size, self.size)


BLOCKS = Blocks()


def choose(logits_NV: torch.Tensor, rows: Rows | None, blocks: Blocks = BLOCKS) -> torch.Tensor:
    """Returns the token id of each row, int64 [N], on the device of the logits; -1 for a row that is not finite.

    Overwrites the logits of the rows in `rows`. `rows` None: every row is greedy, without bans, biases and penalties.
    The logits are float32 and contiguous.
    """
    num_rows, vocab_size = logits_NV.shape
    assert logits_NV.dtype is torch.float32 and logits_NV.is_contiguous()
    out_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NV.device)
    if not num_rows:
        return out_N
    raw = _Best.empty(num_rows, vocab_size, blocks, logits_NV.device)
    scan_kernel[(num_rows, raw.num_blocks)](
        logits_NV, raw.values, raw.ids, vocab_size, BLOCK=blocks.size, **_options("scan")
    )
    drawn = raw if rows is None else _draw(logits_NV, rows, blocks)
    numbers_N = torch.full_like(out_N, -1) if rows is None else rows.numbers_N
    reduce_kernel[(num_rows,)](
        raw.values,
        raw.ids,
        drawn.values,
        drawn.ids,
        numbers_N,
        out_N,
        raw.num_blocks,
        BLOCKS=power_of_two(raw.num_blocks),
        **_options("reduce"),
    )
    return out_N


def add_at(values: torch.Tensor, places_E: torch.Tensor, addends_E: torch.Tensor) -> None:
    """Adds each addend, rounded to the type of `values`, to the element of `values` at its place. All places differ."""
    num_entries = places_E.shape[0]
    if num_entries:
        add_kernel[(num_blocks(num_entries, _ENTRIES),)](
            values, places_E, addends_E, num_entries, BLOCK=_ENTRIES, **_options("add")
        )


def logprobs(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, blocks: Blocks = BLOCKS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns three tensors [N]: the logarithm of the sum of exp(logits), the log-probabilities and the ranks of ids.

    The first two are float32, the last is int32. The logits are float32 and contiguous.
    """
    num_rows, vocab_size = logits_NV.shape
    assert logits_NV.dtype is torch.float32 and logits_NV.is_contiguous()
    log_sums_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    logprobs_N = torch.empty_like(log_sums_N)
    ranks_N = torch.empty(num_rows, dtype=torch.int32, device=logits_NV.device)
    if num_rows:
        logprobs_kernel[(num_rows,)](
            logits_NV, ids_N, log_sums_N, logprobs_N, ranks_N, vocab_size, BLOCK=blocks.size, **_options("logprobs")
        )
    return log_sums_N, logprobs_N, ranks_N


@dataclass(frozen=True, slots=True)
class _Best:
    """The best token of each block of some rows."""

    values: torch.Tensor  # float32 [rows, B]
    ids: torch.Tensor  # int32 [rows, B]

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, blocks: Blocks, device: torch.device) -> _Best:
        shape = (num_rows, blocks.count(vocab_size))
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)
        )

    @property
    def num_blocks(self) -> int:
        return self.values.shape[1]


def _draw(logits_NV: torch.Tensor, rows: Rows, blocks: Blocks) -> _Best:
    """Returns the best token of each block of the M rows, after all rules. Overwrites the logits of these rows."""
    num_rows = rows.ints.shape[0]
    vocab_size = logits_NV.shape[1]
    device = logits_NV.device
    best = _Best.empty(num_rows, vocab_size, blocks, device)
    sizes = {"BLOCK": blocks.size, "INTS": NUM_INTS}
    add_at(logits_NV, rows.places_E, rows.addends_E)
    unused = rows.numbers_N.view(torch.int32)  # stands for a tensor that no row reads
    adjust_kernel[(num_rows, best.num_blocks)](
        logits_NV,
        rows.ints,
        rows.floats,
        unused if rows.masks is None else rows.masks,
        unused if rows.counts is None else rows.counts,
        best.values,
        vocab_size,
        num_blocks(vocab_size, 32),
        FLOATS=NUM_FLOATS,
        **sizes,
        **_options("adjust"),
    )
    thresholds_M = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=device)
    last_ties_M = torch.full((num_rows,), _LAST_ID, dtype=torch.int32, device=device)
    if rows.has_thresholds:
        thresholds_kernel[(num_rows,)](
            logits_NV,
            rows.ints,
            rows.floats,
            best.values,
            thresholds_M,
            last_ties_M,
            vocab_size,
            best.num_blocks,
            BLOCKS=power_of_two(best.num_blocks),
            FLOATS=NUM_FLOATS,
            **sizes,
            **_options("thresholds"),
        )
    draw_kernel[(num_rows, best.num_blocks)](
        logits_NV,
        rows.ints,
        thresholds_M,
        last_ties_M,
        best.values,
        best.ids,
        vocab_size,
        **sizes,
        **_options("draw"),
    )
    return best


def _options(name: str) -> dict[str, Any]:
    # A fused product and sum would round differently from worker/sampler.py.
    return {"num_warps": _NUM_WARPS.get(name, 4), "num_stages": 1, "enable_fp_fusion": False}


_VOCAB_SIZES = (49_152, 128_256, 151_936)
_POINTERS = {
    "logits_ptr": "*fp32",
    "ints_ptr": "*i64",
    "floats_ptr": "*fp64",
    "values_ptr": "*fp32",
    "ids_ptr": "*i32",
    "masks_ptr": "*i32",
    "counts_ptr": "*i32",
    "thresholds_ptr": "*fp32",
    "last_ties_ptr": "*i32",
    "raw_values_ptr": "*fp32",
    "raw_ids_ptr": "*i32",
    "numbers_ptr": "*i64",
    "out_ptr": "*i64",
    "places_ptr": "*i64",
    "log_sums_ptr": "*fp32",
    "logprobs_ptr": "*fp32",
    "ranks_ptr": "*i32",
}


def _shipped(name: str, kernel: Any, variant: str = "", sizes: dict[str, int] | None = None, **types: str) -> Shipped:
    """Returns the configuration of a kernel. `types`: types of arguments that differ from those in _POINTERS."""
    constants = {"BLOCK": BLOCKS.size, "INTS": NUM_INTS, "FLOATS": NUM_FLOATS, **(sizes or {})}
    arguments = kernel.arg_names
    variables = [argument for argument in arguments if argument not in constants]
    return Shipped(
        name=f"sampling-{name}{variant}",
        kernel=kernel,
        signature={argument: types.get(argument, _POINTERS.get(argument, "i32")) for argument in variables},
        constants={argument: constants[argument] for argument in arguments if argument in constants},
        num_warps=_NUM_WARPS.get(name, 4),
        num_stages=1,
        fuses_products=False,
    )


def _shipped_by_blocks() -> list[Shipped]:
    """Returns the kernels that are compiled for a number of blocks, which follows from the vocabulary."""
    shipped = []
    for count in sorted({power_of_two(BLOCKS.count(size)) for size in _VOCAB_SIZES}):
        sizes = {"BLOCKS": count}
        shipped += [
            _shipped("reduce", reduce_kernel, f"-b{count}", sizes),
            _shipped("thresholds", thresholds_kernel, f"-b{count}", sizes),
        ]
    return shipped


SHIPPED = (
    _shipped("scan", scan_kernel),
    _shipped("add", add_kernel, "-logits", {"BLOCK": _ENTRIES}, addends_ptr="*fp64"),
    _shipped("add", add_kernel, "-counts", {"BLOCK": _ENTRIES}, addends_ptr="*i64", values_ptr="*i32"),
    _shipped("adjust", adjust_kernel),
    _shipped("draw", draw_kernel),
    _shipped("logprobs", logprobs_kernel, ids_ptr="*i64"),
    *_shipped_by_blocks(),
)
