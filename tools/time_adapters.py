"""Prints the CPU time of a decode step of the embedded model with random LoRA adapters, beside that without.

The variants take turns, on one thread, so that other work of the machine changes all of them alike. A prompt chunk is
measured in the same way.

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
    variants = {
        "16 decodes, no adapter": step(model, cache, [1] * STREAMS, [-1] * STREAMS),
        **{
            f"16 decodes, {number} adapters": step(
                model, cache, [1] * STREAMS, [index * number // STREAMS for index in range(STREAMS)]
            )
            for number in (1, 2, 4, 8, 16)
        },
        "1 decode, no adapter": step(model, cache, [1], [-1]),
        "1 decode, 1 adapter": step(model, cache, [1], [0]),
        f"a chunk of {CHUNK}, no adapter": step(model, cache, [CHUNK], [-1]),
        f"a chunk of {CHUNK}, 1 adapter": step(model, cache, [CHUNK], [0]),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(args.rounds):
        for name, run in variants.items():
            began = time.thread_time()
            run()
            times[name].append(time.thread_time() - began)
    plain = 0.0
    for name, found in times.items():
        seconds = statistics.median(found)
        plain = seconds if "no adapter" in name else plain
        print(f"{name:32} {1000 * seconds:8.2f} ms   throughput {100 * plain / seconds:5.1f} %")


if __name__ == "__main__":
    main()
