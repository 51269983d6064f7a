"""Times the samplers of a CPU rank side by side: torch (worker/sampler.py) and the C library (worker/cpu_sampler.py).

`python tools/time_sampler.py` prints a table in Markdown. Its figures are milliseconds of CPU time for one row on one
thread. A figure is the median of many calls. The calls alternate between the samplers, and each call has a new seed.
`--isa` chooses another instruction set, `--spread` chooses the standard deviation of the logits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot
from rayloom_engine.cpu_library.finding import find_library
from rayloom_engine.cpu_library.library import CpuLibrary, LibraryFunctions
from rayloom_engine.models.checkpoint.source import cache_folder
from rayloom_engine.worker.cpu_sampler import CpuSampler
from rayloom_engine.worker.sampler import Sampler
from rayloom_engine.worker.slots import Slot

VOCAB_SIZES = (49_152, 151_936)
WARM_UP = 3  # calls of each sampler that are not counted
CONTEXT = 1000  # number of tokens of the sequence, half of them generated
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_k 50, top_p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "three penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
}


def milliseconds(calls: Sequence[Callable[[int], object]], count: int) -> list[float]:
    """Returns the median CPU time of each call over `count` rounds. A call gets the number of the round."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(WARM_UP + count):
        for call, taken in zip(calls, times, strict=True):
            started = time.thread_time()
            call(number)
            taken.append(1000 * (time.thread_time() - started))
    return [statistics.median(taken[WARM_UP:]) for taken in times]


def make_slot(token_ids: list[int], seed: int, params: dict[str, float]) -> Slot:
    return Slot(
        NewSlot(
            slot=0,
            request_id="timed",
            token_ids=tuple(token_ids),
            num_prompt_tokens=CONTEXT // 2,
            block_table=(0,),
            params=DecodingParams(max_tokens=CONTEXT, seed=seed, **params),  # type: ignore[arg-type]
            eos_token_ids=(),
        )
    )


class Comparison:
    """Both samplers on the same row of random logits."""

    def __init__(self, library: CpuLibrary, vocab_size: int, spread: float, rounds: int) -> None:
        self._vocab_size = vocab_size
        self._rounds = rounds
        self._logits_1V = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
        self._old = Sampler(vocab_size, torch.device("cpu"))
        self._new = CpuSampler(library, vocab_size)

    def time_choice(self, name: str, params: dict[str, float]) -> None:
        generator = torch.Generator().manual_seed(2)
        token_ids = torch.randint(0, self._vocab_size, (CONTEXT,), generator=generator).tolist()
        slots = [make_slot(token_ids, seed, params) for seed in range(self._rounds + WARM_UP)]
        self._print(
            name,
            # The copy counts as torch's time, because torch's sampler overwrites the logits.
            lambda number: self._old(self._logits_1V.clone(), [slots[number]]),
            lambda number: self._new(self._logits_1V.numpy(), [slots[number]]),
        )

    def time_logprobs(self, name: str, num_top: int) -> None:
        self._print(
            name,
            lambda _: self._old.describe(self._logits_1V, [7], [num_top]),
            lambda _: self._new.describe(self._logits_1V.numpy(), [7], [num_top]),
        )

    def _print(self, name: str, *calls: Callable[[int], object]) -> None:
        old, new = milliseconds(calls, self._rounds)
        print(f"| {self._vocab_size:,} | {name} | {old:.3f} | {new:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", help="default: the best of this CPU")
    parser.add_argument("--spread", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=41)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = find_library(cache_folder(os.environ), os.environ)
    if found.path is None:
        raise SystemExit(f"there is no C library: {found.problem}")
    functions = LibraryFunctions(found.path)
    library = CpuLibrary(functions, args.isa or functions.instruction_sets[0])
    library.start_threads(1, pin=False)
    print(f"{library.description}, logits with standard deviation {args.spread}\n")
    print("| vocabulary | settings | torch, ms | C library, ms |\n|---|---|---|---|")
    for vocab_size in VOCAB_SIZES:
        comparison = Comparison(library, vocab_size, args.spread, args.rounds)
        for name, params in SETTINGS.items():
            comparison.time_choice(name, params)
        comparison.time_logprobs("logprobs, 5 alternatives", 5)


if __name__ == "__main__":
    main()
