"""Prints the CPU time of a decode step of the embedded model, with and without random LoRA adapters.

A step with adapters is measured right after the same step without adapters, on one thread. So other work of the machine
changes both alike. The throughput is the median of the ratios of all such pairs. A chunk of a prompt is measured in the
same way.

    python tools/time_adapters.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from rayloom_engine.core.adapter import AdapterLoad
from rayloom_engine.cpu_library.finding import find_library
from rayloom_engine.cpu_library.library import CpuLibrary, LibraryFunctions
from rayloom_engine.kv.library_pages import LibraryPages
from rayloom_engine.kv.paged_batch import PagedBatch
from rayloom_engine.models.adapters.peft_folder import adapter_of
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.models.checkpoint.source import cache_folder, resolve
from rayloom_engine.models.on_library.decoder import BLOCK_SIZE, LibraryDecoder
from rayloom_engine.models.on_library.loader import load_decoder
from rayloom_engine.models.shape import read_shape
from rayloom_engine.worker.library_computation import weight_format
from rt_adapters import write_adapter

STREAMS = 16
CONTEXT = 256
CHUNK = 256


def step(model: LibraryDecoder, cache: LibraryPages, lens: list[int], slots: list[int]) -> Callable[[], None]:
    """Returns a call that computes the last tokens of sequences with CONTEXT tokens each. `slots`: their adapters."""
    num_blocks = CONTEXT // BLOCK_SIZE
    tables = np.arange(len(lens) * num_blocks).reshape(len(lens), num_blocks)
    positions = [np.arange(CONTEXT - count, CONTEXT) for count in lens]
    places = [
        row[each // BLOCK_SIZE] * BLOCK_SIZE + each % BLOCK_SIZE for row, each in zip(tables, positions, strict=True)
    ]
    batch = PagedBatch(
        query_lens=tuple(lens),
        context_lens=(CONTEXT,) * len(lens),
        block_tables_SB=tables,
        slot_mapping_T=np.concatenate(places),
        adapters_T=np.repeat(np.array(slots, dtype=np.int32), lens) if max(slots) >= 0 else None,
    )
    ids = np.arange(sum(lens)) % 1000
    wanted = (np.cumsum(lens) - 1).tolist()
    return lambda: model.logits(
        model.forward(ids, np.concatenate(positions), batch, cache, wanted_rows=wanted).take(wanted, axis=0)
    ).argmax(axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    path = find_library(cache_folder(os.environ), os.environ).path
    assert path is not None, "there is no C library"
    functions = LibraryFunctions(path)
    library = CpuLibrary(functions, functions.instruction_sets[0])
    library.start_threads(1, pin=False)
    folder = resolve("builtin://smollm2-135m", None, no_progress).path
    model = load_decoder(folder, read_shape(folder), weight_format(library, "bfloat16", "none")).decoder
    cache = LibraryPages.allocate(
        model.kv_layout, num_blocks=STREAMS * CONTEXT // BLOCK_SIZE, block_size=BLOCK_SIZE, dtype=model.dtype
    )
    with tempfile.TemporaryDirectory() as parent:
        for slot in range(STREAMS):
            adapter = write_adapter(Path(parent) / str(slot), folder, seed=slot, rank=args.rank, size=0.1)
            model.load_adapter(AdapterLoad(slot, adapter_of(adapter)))
    decodes = [1] * STREAMS
    pairs = {
        f"{STREAMS} decodes, adapters: {number}": (
            step(model, cache, decodes, [-1] * STREAMS),
            step(model, cache, decodes, [index * number // STREAMS for index in range(STREAMS)]),
        )
        for number in (1, 2, 4, 8, 16)
    }
    for name, lens in (("1 decode", [1]), (f"{CHUNK} tokens of a prompt", [CHUNK])):
        pairs[f"{name}, adapters: 1"] = (step(model, cache, lens, [-1]), step(model, cache, lens, [0]))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for _ in range(args.rounds):
        for name, (plain, adapted) in pairs.items():
            times[name].append((seconds_of(plain), seconds_of(adapted)))
    for name, found in times.items():
        plain_s, adapted_s = (statistics.median(side) for side in zip(*found, strict=True))
        shares = statistics.quantiles([100 * before / after for before, after in found], n=4)
        print(
            f"{name:36} {1000 * plain_s:7.2f} -> {1000 * adapted_s:7.2f} ms   throughput {shares[1]:5.1f} % "
            f"(quartiles {shares[0]:.1f}, {shares[2]:.1f})"
        )


def seconds_of(run: Callable[[], None]) -> float:
    """Returns the CPU time of this thread in a call."""
    began = time.thread_time()
    run()
    return time.thread_time() - began


if __name__ == "__main__":
    main()
