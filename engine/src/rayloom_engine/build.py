"""Builds an engine for a config out of a rank, a scheduler and an executor."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayloom_engine.config import BLOCK_SIZE, EngineConfig
from rayloom_engine.core.engine import Engine, Executor, LocalExecutor
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.step_work import StepWork
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.models.checkpoint.source import ResolvedModel
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.protocol.messages import ModelStatus
from rayloom_engine.worker.start import find_model, start_rank

if TYPE_CHECKING:
    from rayloom_engine.worker.loaded_rank import LoadedRank


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    engine: Engine
    model: ModelStatus
    kv_explanation: str
    rank: LoadedRank


def build_engine(config: EngineConfig, epoch: int, progress: Progress) -> BuiltEngine:
    """A ready engine with one rank in this process. Raises ModelError or ConfigError."""
    resolved, shape = find_model(config, progress)
    return build_found_engine(config, resolved, shape, epoch, progress)


def build_found_engine(
    config: EngineConfig, resolved: ResolvedModel, shape: ModelShape, epoch: int, progress: Progress
) -> BuiltEngine:
    """A ready engine with one rank in this process, for a model that `find_model` has found."""
    rank, runner = start_rank(config, resolved, shape, epoch, progress)
    return BuiltEngine(
        engine=engine_on(
            config,
            LocalExecutor(runner),
            shape,
            EngineSizes(
                num_blocks=rank.kv.num_blocks,
                max_model_len=rank.kv.max_model_len,
                num_step_tokens=rank.num_step_tokens,
            ),
            epoch,
        ),
        model=ModelStatus(
            path=str(resolved.path),
            architecture=shape.architecture,
            num_parameters=shape.num_parameters,
            vocab_size=shape.vocab_size,
            max_model_len=rank.kv.max_model_len,
            eos_token_ids=shape.eos_token_ids,
            dtype=rank.dtype,
            compute_dtype=rank.compute_dtype,
            weight_bytes=rank.weight_bytes,
            commit=resolved.commit,
        ),
        kv_explanation=rank.kv.explanation,
        rank=rank,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Sizes that the ranks have memory for."""

    num_blocks: int  # KV blocks
    max_model_len: int  # tokens of the longest sequence
    num_step_tokens: int  # the most tokens of one step


def engine_on(config: EngineConfig, executor: Executor, shape: ModelShape, sizes: EngineSizes, epoch: int) -> Engine:
    """An engine, with its scheduler, for ranks of these sizes that are ready for plans of `epoch`."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=sizes.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=sizes.num_step_tokens,
            max_model_len=sizes.max_model_len,
            max_queued=config.max_queued_requests,
            enable_prefix_caching=config.enable_prefix_caching,
            depth=config.pipeline_parallel_size,  # one step for each stage
            window=shape.attention_span,
        ),
        epoch,
    )
    return Engine(scheduler, executor, clock=time.monotonic, work=stage_work(shape, config.pipeline_parallel_size))


def stage_work(shape: ModelShape, num_stages: int) -> StepWork:
    """The cost of a token on one of `num_stages` equal stages, as if one rank did all work of its stage."""
    return StepWork(
        flops_per_token=2 * shape.num_parameters / num_stages,
        flops_per_pair=4 * shape.query_size * shape.num_layers / num_stages,  # q x k and weights x v
        num_layers=max(1, shape.num_layers // num_stages),
        window=shape.attention_span,
    )
