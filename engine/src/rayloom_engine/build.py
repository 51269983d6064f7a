"""Builds the engine of a config from a rank or rank processes, a scheduler and an executor."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

import msgspec

from rayloom_engine.config import BLOCK_SIZE, EngineConfig
from rayloom_engine.core.engine import Engine, Executor, LocalExecutor
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.speculation.drafter import SpeculationConfig
from rayloom_engine.core.step_work import StepWork
from rayloom_engine.errors import ModelError
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.models.checkpoint.source import ResolvedModel
from rayloom_engine.models.content_hash import content_hash
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.protocol.fingerprint import Fingerprint
from rayloom_engine.protocol.messages import ServedModel
from rayloom_engine.protocol.text_files import TOKENIZER, text_files
from rayloom_engine.worker.start import find_model, start_rank

if TYPE_CHECKING:
    from rayloom_engine.worker.draft_forms import DraftForms
    from rayloom_engine.worker.forms import Forms
    from rayloom_engine.worker.host_memory import HostMemoryPlace
    from rayloom_engine.worker.loaded_rank import LoadedRank


@dataclass(frozen=True, slots=True)
class FoundModel:
    """The files of a model on this machine, and the model's shape."""

    resolved: ResolvedModel
    shape: ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    engine: Engine
    model: ServedModel
    kv_explanation: str
    rank: LoadedRank


def build_engine(config: EngineConfig, epoch: int, progress: Progress) -> BuiltEngine:
    """Returns a ready engine with one rank in this process. Raises ModelError or ConfigError."""
    return build_found_engine(config, FoundModel(*find_model(config, progress)), epoch, progress)


def build_found_engine(
    config: EngineConfig, found: FoundModel, epoch: int, progress: Progress, host: HostMemoryPlace | None = None
) -> BuiltEngine:
    """Returns a ready engine with one rank in this process, for a model that `find_model` has found.

    `host`: the place of the host memory for copies of KV blocks; None: it ends with this process.
    """
    rank, runner = start_rank(config, found.resolved, found.shape, epoch, progress, host)
    sizes = EngineSizes(
        num_blocks=rank.kv.num_blocks,
        max_model_len=rank.kv.max_model_len,
        num_step_tokens=rank.num_step_tokens,
        num_kept_blocks=rank.kv.num_kept_blocks,
        num_host_slots=0 if rank.host is None else rank.host.num_slots,
    )
    return BuiltEngine(
        engine=engine_on(config, LocalExecutor(runner), found.shape, sizes, epoch, rank.forms),
        model=served_model(config, found, rank, weight_bytes=rank.weight_bytes, max_model_len=rank.kv.max_model_len),
        kv_explanation=rank.kv.explanation,
        rank=rank,
    )


class RankArithmetic(Protocol):
    """The arithmetic of a rank. All ranks of an engine compute in the same way."""

    @property
    def dtype(self) -> str: ...

    @property
    def compute_dtype(self) -> str: ...

    @property
    def quantization(self) -> str: ...

    @property
    def arithmetic(self) -> str: ...


def served_model(
    config: EngineConfig, found: FoundModel, rank: RankArithmetic, *, weight_bytes: int, max_model_len: int
) -> ServedModel:
    """Returns the facts about the model that a front needs. `weight_bytes`: bytes of the weights on all ranks together.

    If the engine has a port for gateways, reads the model's files, because gateways need hashes of them. Raises
    ModelError if a file cannot be read.
    """
    served = ServedModel(
        path=str(found.resolved.path),
        architecture=found.shape.architecture,
        num_parameters=found.shape.num_parameters,
        vocab_size=found.shape.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=found.shape.eos_token_ids,
        dtype=rank.dtype,
        compute_dtype=rank.compute_dtype,
        quantization=rank.quantization,
        weight_bytes=weight_bytes,
        commit=found.resolved.commit,
        hidden_size=found.shape.hidden_size if config.enable_prompt_embeds else 0,
    )
    if config.front_port is None:
        return served
    folder = found.resolved.path
    try:
        files = text_files(folder)
        content = found.resolved.commit or content_hash(folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    fingerprint = Fingerprint(
        architecture=found.shape.architecture,
        commit=found.resolved.commit,
        content_hash=content,
        tokenizer_hash=next((file.sha256 for file in files if file.name == TOKENIZER), ""),
        dtype=rank.dtype,
        compute_dtype=rank.compute_dtype,
        quantization=rank.quantization,
        arithmetic=rank.arithmetic,
        tensor_parallel_size=config.tensor_parallel_size,
        engine_version=version("rayloom-engine"),
        max_model_len=max_model_len,
        rope_context=found.shape.rope.context_len,
    )
    return msgspec.structs.replace(served, fingerprint=fingerprint, text_files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """The sizes of KV cache, sequences and steps that fit into the ranks' memory."""

    num_blocks: int  # number of KV blocks
    max_model_len: int  # longest sequence, in tokens
    num_step_tokens: int  # most tokens in one step
    num_kept_blocks: int | None = None  # limit of cached blocks at the beginning, as in KvPlan; None: no limit
    num_host_slots: int = 0  # copies of KV blocks that the host memory of every rank has room for


def engine_on(
    config: EngineConfig,
    executor: Executor,
    shape: ModelShape,
    sizes: EngineSizes,
    epoch: int,
    forms: Forms | None = None,
) -> Engine:
    """Returns an engine with its scheduler, for ranks that have these sizes and are ready for plans of `epoch`.

    `forms`: the grammars with which the scheduler cuts drafts; None: drafts are not cut.
    """
    # A plan ahead has placeholders for tokens that are not sampled yet. No plan is made ahead in three cases:
    # - several ranks: only the sampling rank could fill in placeholders
    # - no rank process: the core itself computes the plans, one after the other
    # - speculation: the core must know the newest token's id to make the next draft
    speculation = speculation_of(config)
    has_rank_process = config.world_size == 1 and not isinstance(executor, LocalExecutor)
    num_ahead = int(config.async_scheduling and has_rank_process and speculation is None)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=sizes.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=sizes.num_step_tokens,
            max_model_len=sizes.max_model_len,
            max_queued=config.max_queued_requests,
            enable_prefix_caching=config.enable_prefix_caching,
            num_kept_blocks=sizes.num_kept_blocks,
            num_host_slots=sizes.num_host_slots,
            depth=config.pipeline_parallel_size + num_ahead,  # one plan for each stage, and the plan ahead, if any
            num_ahead=num_ahead,
            max_loras=config.max_loras if config.takes_adapters else 0,
            window=shape.attention_span,
            speculation=speculation,
        ),
        epoch,
        grammars=_draft_forms(forms) if speculation is not None else None,
    )
    return Engine(scheduler, executor, clock=time.monotonic, work=stage_work(shape, config.pipeline_parallel_size))


def _draft_forms(forms: Forms | None) -> DraftForms | None:
    if forms is None:
        return None
    from rayloom_engine.worker.draft_forms import DraftForms

    return DraftForms(forms)


def speculation_of(config: EngineConfig) -> SpeculationConfig | None:
    """Returns the settings of speculation; None if speculation is off."""
    if config.speculation == "off":
        return None
    return SpeculationConfig(
        num_tokens=config.num_speculative_tokens,
        min_ngram=config.ngram_min,
        max_ngram=config.ngram_max,
        has_draft_model=config.speculation == "draft",
    )


def stage_work(shape: ModelShape, num_stages: int) -> StepWork:
    """Returns a stage's operation counts. All `num_stages` stages count as equal. A stage counts as one rank."""
    return StepWork(
        flops_per_token=2 * shape.num_active_parameters / num_stages,
        flops_per_pair=4 * shape.query_size * shape.num_layers / num_stages,  # query x key, and weights x value
        num_layers=max(1, shape.num_layers // num_stages),
        window=shape.attention_span,
    )
