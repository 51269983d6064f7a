"""Times of steps on a GPU: decode steps of many sizes, chunks of a prompt, and steps of a whole engine."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from rayloom_bench.gpu.rank import RandomRank
from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.step import NewSlot
from rayloom_engine.kv.paged_batch import PagedBatch
from rayloom_engine.parallel.tensor_group import OneRank
from rayloom_engine.worker.batch import InputBatch
from rayloom_engine.worker.runner import Runner
from rayloom_engine.worker.slots import Slot
from rayloom_engine.worker.torch_computation import TorchComputation

_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    batch_size: int
    context_len: int
    has_graph: bool
    step_s: float  # wall time of forward pass, head, greedy choice, and the copy of the tokens to the host
    read_bytes: int  # weights and KV that the step must read


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTime:
    num_tokens: int
    seconds: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """Decode steps of a whole engine in this process: scheduler, runner, forward pass, sampler."""

    batch_size: int
    step_s: float
    compute_s: float  # seconds of forward pass and sampler, in which the host waits for the GPU
    tokens_per_s: float


def decode_batch(batch_size: int, context_len: int) -> InputBatch:
    """A step in which each sequence computes the last token of a context of this length."""
    num_blocks = -(-context_len // BLOCK_SIZE)
    tables_SB = 1 + np.arange(batch_size * num_blocks, dtype=np.int64).reshape(batch_size, num_blocks)
    positions_T = np.full(batch_size, context_len - 1, dtype=np.int64)
    places_T = tables_SB[:, -1] * BLOCK_SIZE + (context_len - 1) % BLOCK_SIZE
    paged = PagedBatch(
        query_lens=(1,) * batch_size,
        context_lens=(context_len,) * batch_size,
        block_tables_SB=tables_SB,
        slot_mapping_T=places_T,
    )
    token_ids_T = np.arange(batch_size, dtype=np.int64) + 5
    return InputBatch(
        steps=[], token_ids_T=token_ids_T, positions_T=positions_T, ends=list(range(1, batch_size + 1)), attention=paged
    )


def greedy_slots(num: int) -> list[Slot]:
    params = DecodingParams(max_tokens=1 << 20, temperature=0.0)
    return [
        Slot(
            NewSlot(
                slot=index,
                request_id=str(index),
                token_ids=(1,),
                num_prompt_tokens=1,
                block_table=(1,),
                params=params,
                eos_token_ids=(),
            )
        )
        for index in range(num)
    ]


def decode_step(computation: TorchComputation, batch: InputBatch, slots: list[Slot]) -> None:
    with computation.step():
        hidden_TD = computation.forward(batch, None, OneRank(), None)
        computation.sample(computation.logits(hidden_TD), slots)


def time_decode(
    rank: RandomRank, computation: TorchComputation, batch_size: int, context_len: int, *, has_graph: bool
) -> DecodeTime:
    """Returns the median of several steps, after three steps that do not count."""
    batch, slots = decode_batch(batch_size, context_len), greedy_slots(batch_size)
    times = []
    for number in range(_ROUNDS + 3):
        began = time.perf_counter()
        decode_step(computation, batch, slots)
        if number >= 3:
            times.append(time.perf_counter() - began)
    return DecodeTime(
        batch_size=batch_size,
        context_len=context_len,
        has_graph=has_graph,
        step_s=statistics.median(times),
        read_bytes=rank.read_bytes + rank.kv_bytes(batch_size * context_len),
    )


def chunk_batch(start: int, num_tokens: int) -> InputBatch:
    """A step that computes positions [start, start + num_tokens) of one sequence."""
    end = start + num_tokens
    table_B = 1 + np.arange(-(-end // BLOCK_SIZE), dtype=np.int64)
    positions_T = np.arange(start, end, dtype=np.int64)
    paged = PagedBatch(
        query_lens=(num_tokens,),
        context_lens=(end,),
        block_tables_SB=table_B[None],
        slot_mapping_T=table_B[positions_T // BLOCK_SIZE] * BLOCK_SIZE + positions_T % BLOCK_SIZE,
    )
    token_ids_T = positions_T * 7 % 997
    return InputBatch(steps=[], token_ids_T=token_ids_T, positions_T=positions_T, ends=[num_tokens], attention=paged)


def time_prefill(
    rank: RandomRank, computation: TorchComputation, num_tokens: int, chunk: int = 8192, rounds: int = 3
) -> PrefillTime:
    """Returns the least time of several rounds that compute a prompt in chunks. The first round does not count."""
    times = []
    for number in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for start in range(0, num_tokens, chunk):
            batch = chunk_batch(start, min(chunk, num_tokens - start))
            with computation.step():
                hidden_TD = computation.forward(batch, None, OneRank(), None)
                computation.logits(hidden_TD[-1:])
        torch.cuda.synchronize()
        if number:
            times.append(time.perf_counter() - began)
    shape = rank.shape
    pairs = num_tokens * (num_tokens + 1) / 2
    flops = 2.0 * shape.num_layer_parameters * shape.num_layers * num_tokens
    flops += 4.0 * shape.query_size * shape.num_layers * pairs
    return PrefillTime(num_tokens=num_tokens, seconds=min(times), flops=flops)


def time_engine(rank: RandomRank, computation: TorchComputation, batch_size: int, num_tokens: int = 64) -> EngineTime:
    """Runs requests of 128 prompt tokens through a whole engine, and returns the median of its full decode steps."""
    runner = Runner(computation, rank.shape, rank.model.part, epoch=1)
    config = SchedulerConfig(
        num_blocks=rank.cache.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=batch_size,
        max_num_batched_tokens=8192,
        max_model_len=256,
        max_queued=1024,
    )
    engine = Engine(Scheduler(config, 1), LocalExecutor(runner), clock=time.perf_counter)
    params = DecodingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for index in range(batch_size):
        prompt = [(index * 131 + position * 7) % 997 for position in range(128)]
        engine.add(Sequence(request_id=str(index), prompt_ids=prompt, params=params))
    times, forwards = [], []
    while engine.has_unfinished:
        before = engine.times.forward + engine.times.sample
        began = time.perf_counter()
        outputs = engine.step()
        took = time.perf_counter() - began
        if len(outputs) == batch_size:
            times.append(took)
            forwards.append(engine.times.forward + engine.times.sample - before)
    step_s = statistics.median(times[2:])
    return EngineTime(
        batch_size=batch_size,
        step_s=step_s,
        compute_s=statistics.median(forwards[2:]),
        tokens_per_s=batch_size / step_s,
    )
