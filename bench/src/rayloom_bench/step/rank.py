"""StepRank: a model on the C library, whose steps are measured phase by phase."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from rayloom_bench.step.cost import ElementBytes, StepShape
from rayloom_engine.config import BLOCK_SIZE, INT8_GROUP, EngineConfig
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, SlotStep, StepPlan
from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, ElementType
from rayloom_engine.cpu_library.library import PHASES, CpuLibrary
from rayloom_engine.errors import ConfigError
from rayloom_engine.kv.library_pages import LibraryPages
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.models.checkpoint.source import cache_folder
from rayloom_engine.models.on_library.decoder import LibraryDecoder
from rayloom_engine.models.on_library.loader import load_decoder
from rayloom_engine.worker.cpu_backend import ModelOnCpu, choose_cpu_library
from rayloom_engine.worker.device import choose_weight_type
from rayloom_engine.worker.library_computation import LibraryComputation, weight_format
from rayloom_engine.worker.runner import Runner
from rayloom_engine.worker.start import find_model

# The phases of a step, in order. "host" is the rest of the step: Python's part of the rank, embedding and rotary
# tables.
STEP_PHASES = (*PHASES, "head", "sampling", "host")


class _TimedHead(LibraryComputation):
    """Measures the seconds that the head of the model takes."""

    def __init__(self, decoder: LibraryDecoder, cache: LibraryPages) -> None:
        super().__init__(decoder, cache)
        self.head_s = 0.0
        self.logits = self._timed_logits

    def _timed_logits(self, hidden_ND: Array) -> npt.NDArray[np.float32]:
        start = time.perf_counter()
        logits_NV = self._decoder.logits(hidden_ND)
        self.head_s += time.perf_counter() - start
        return logits_NV


class StepRank:
    """A loaded model. `shape`, `dtype` and `element_bytes` are the model's. `library` has started its threads."""

    def __init__(self, config: EngineConfig, num_threads: int, environ: Mapping[str, str]) -> None:
        """Raises ConfigError or ModelError, for example if the library cannot compute the model."""
        torch.set_num_threads(num_threads)
        resolved, self.shape = find_model(config, no_progress)
        dtype = choose_weight_type(config.dtype, self.shape.checkpoint_dtype)
        self.is_int8 = config.quantization == "int8"
        on_cpu = ModelOnCpu(shape=self.shape, num_shards=1, dtype=dtype, cut_unit=INT8_GROUP if self.is_int8 else 1)
        chosen = choose_cpu_library(
            on_cpu, "auto", num_threads=num_threads, cache=cache_folder(environ), environ=environ
        )
        if chosen.library is None:
            raise ConfigError(f"bench step measures the CPU library: {chosen.problem or 'it is switched off'}")
        self.library: CpuLibrary = chosen.library
        form = weight_format(self.library, dtype, config.quantization)
        self.dtype: ElementType = form.dtype
        num_bytes = ELEMENTS[form.dtype].itemsize
        self.element_bytes = ElementBytes(1 if self.is_int8 else num_bytes, num_bytes)
        self._decoder = load_decoder(resolved.path, self.shape, form).decoder

    def runner(self, num_sequences: int, num_positions: int) -> StepRunner:
        """Returns a runner with memory for these sequences. All of their positions count as computed."""
        return StepRunner(self._decoder, num_sequences, num_positions)


class StepRunner:
    """Runs steps over sequences of `num_positions` tokens. Keys and values of earlier positions are zeros."""

    def __init__(self, decoder: LibraryDecoder, num_sequences: int, num_positions: int) -> None:
        self._library = decoder.library
        shape = decoder.shape
        num_blocks = -(-num_positions // BLOCK_SIZE)
        cache = LibraryPages.allocate(
            decoder.kv_layout,
            num_blocks=num_sequences * num_blocks,
            block_size=BLOCK_SIZE,
            dtype=decoder.dtype,
        )
        # All blocks are written once. Memory pages that were never written share one page of zeros, which would stay in
        # the processor's cache.
        cache.clear_blocks(tuple(range(cache.num_blocks)))
        self._model = _TimedHead(decoder, cache)
        self._runner = Runner(self._model, shape, decoder.part, 0)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(shape.vocab_size, (num_sequences, num_positions), generator=generator).tolist()
        new = tuple(
            NewSlot(
                slot=number,
                request_id=f"bench-{number}",
                token_ids=tuple(ids[number]),
                num_prompt_tokens=num_positions,
                block_table=tuple(range(number * num_blocks, (number + 1) * num_blocks)),
                params=DecodingParams(max_tokens=1, temperature=0.0),
                eos_token_ids=(),
            )
            for number in range(num_sequences)
        )
        self._runner.run(StepPlan(step_id=0, epoch=0, new_slots=new, slots=(_slot_step(0, num_positions - 1, 1),)))

    def seconds(self, step: StepShape) -> dict[str, float]:
        """Runs a step, and returns the seconds of each of STEP_PHASES."""
        slots = tuple(
            _slot_step(number, start, count)
            for number, (start, count) in enumerate(zip(step.starts, step.counts, strict=True))
        )
        plan = StepPlan(step_id=0, epoch=0, slots=slots)
        self._model.head_s = 0.0
        with self._library.profile() as phases:
            start_s = time.perf_counter()
            result = self._runner.run(plan)
            wall_s = time.perf_counter() - start_s
        found = {**dict(zip(PHASES, phases, strict=True)), "head": self._model.head_s, "sampling": result.sample_s}
        return {**found, "host": max(0.0, wall_s - sum(found.values()))}


def _slot_step(number: int, start: int, count: int) -> SlotStep:
    return SlotStep(slot=number, start=start, num_tokens=count, samples=True)


def decode_step(batch: int, context: int) -> StepShape:
    """A step over `batch` sequences of `context` tokens, which computes the last token of each sequence."""
    return StepShape(starts=(context - 1,) * batch, counts=(1,) * batch)


def prefill_steps(length: int, chunk: int) -> list[StepShape]:
    """The steps of a prompt of `length` tokens, of at most `chunk` tokens each."""
    return [StepShape(starts=(start,), counts=(min(chunk, length - start),)) for start in range(0, length, chunk)]


def fastest(runner: StepRunner, steps: list[StepShape], repeats: int) -> dict[str, float]:
    """Seconds of each phase, summed over the steps, in the fastest of `repeats` runs. A first run is not counted."""
    best: dict[str, float] = {}
    for repeat in range(repeats + 1):
        run = dict.fromkeys(STEP_PHASES, 0.0)
        for step in steps:
            for name, seconds in runner.seconds(step).items():
                run[name] += seconds
        if repeat == 1 or (repeat > 1 and sum(run.values()) < sum(best.values())):
            best = run
    return best
