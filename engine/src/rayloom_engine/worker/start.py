"""Starts a rank, and reports each phase: find the model, choose types and kernels, load weights, size the KV cache.

After that, a runner is made and warmed up.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from rayloom_engine.common.process import return_free_memory, without_garbage_collection
from rayloom_engine.config import BLOCK_SIZE, EngineConfig
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.embeds import most_step_rows
from rayloom_engine.core.step import FIRST_EPOCH, NewSlot, SlotStep, StepPlan
from rayloom_engine.errors import ConfigError
from rayloom_engine.grammar.vocabulary import Vocabulary
from rayloom_engine.kv.memory import GIB, KvDemand, KvPlan, RankMemory, SequenceBlocks, plan_kv_memory
from rayloom_engine.models.adapters.memory import adapter_token_bytes
from rayloom_engine.models.adapters.support import REMOVE_IN_WORDS, check_adapters
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.models.checkpoint.source import ResolvedModel, resolve
from rayloom_engine.models.embeds_support import check_takes_embeds, embeds_step_bytes
from rayloom_engine.models.int8_shape import check_groups, check_int8
from rayloom_engine.models.largest_step import LargestStep, held_bytes, with_draft_model
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.reading import read_model_shape
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.shard_counts import check_shards, check_stages
from rayloom_engine.parallel.model_part import ModelPart, whole_part
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import make_stages, split_layers
from rayloom_engine.worker.draft_loading import find_draft
from rayloom_engine.worker.host_memory import HostMemoryPlace, model_identity, open_host_memory
from rayloom_engine.worker.machine import usable_cores

if TYPE_CHECKING:
    from rayloom_engine.worker.computation import LoadedPart
    from rayloom_engine.worker.forms import Forms
    from rayloom_engine.worker.loaded_rank import LoadedRank
    from rayloom_engine.worker.runner import Runner

logger = logging.getLogger(__name__)

_CPU_STEP_TOKENS = 512  # on small machines this keeps a step under about a second, so that decodes are not delayed
_GPU_STEP_TOKENS = 8192


def find_model(
    config: EngineConfig, progress: Progress, *, has_weights: bool = True, commit: str | None = None
) -> tuple[ResolvedModel, ModelShape]:
    """Returns the model's folder and shape. Raises ModelError or ConfigError.

    `commit`: of a hub model, if the engine serves one already; None: the newest commit of the config's revision.

    A rotary embedding may depend on the longest context. It is computed for the user's `max_model_len`, or else for the
    model's longest context. Later, the first process may cut the context to fit into memory. A restarted process must
    still pass the `config` of the first start: with the cut context as `max_model_len`, the embedding would differ.

    Does not import torch, so that errors are reported without delay. `has_weights`: False in a process that holds no
    part of the model and so needs no weight files.
    """
    # A GGUF file names no type for dense weights. So a user who sets `dtype` asks for dense weights of this type.
    keeps_blocks = config.quantization == "auto" and config.dtype == "auto"
    revision = commit or config.revision
    resolved = resolve(config.model, revision, progress, has_weights=has_weights, keeps_blocks=keeps_blocks)
    shards = config.tensor_parallel_size
    shape = read_model_shape(resolved.path, config.model_backend, in_child=not has_weights, num_shards=shards)
    longest = config.max_model_len
    if longest is not None and longest > shape.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: {longest} is more than the model's {shape.max_position_embeddings} positions"
        )
    if isinstance(shape, MeasuredShape) and shape.not_native:
        logger.warning(
            "model_backend auto takes transformers' modules for %s, because native refuses it: %s",
            shape.architecture,
            shape.not_native,
        )
    check_stages(shape, config.pipeline_parallel_size)
    split_layers(shape.num_layers, config.pipeline_parallel_size)
    check_shards(shape, config.tensor_parallel_size)
    if config.takes_adapters:
        check_adapters(shape)
    if config.enable_prompt_embeds:
        check_takes_embeds(shape)
    if config.quantization == "int8":
        check_int8(shape, config.dtype, config.tensor_parallel_size)
    elif config.quantization == "auto" and shape.scheme is not None:
        check_groups(shape, config.tensor_parallel_size)
    return resolved, shape.for_context(longest or shape.max_position_embeddings)


def part_of(config: EngineConfig, shape: ModelShape, rank: int) -> ModelPart:
    """Returns a rank's part of the model. The ranks of a stage have consecutive numbers. Raises ConfigError."""
    num_shards = config.tensor_parallel_size
    stages = make_stages(shape.num_layers, config.pipeline_parallel_size, shape.head_layers)
    return ModelPart(stages[rank // num_shards], Shard(rank % num_shards, num_shards))


def set_threads(config: EngineConfig, ranks_on_host: int = 1) -> int:
    """Sets the size of this process's thread pool and returns it. Call before importing torch: OpenMP reads it once."""
    threads = config.threads or max(1, usable_cores() // (ranks_on_host * config.engines_on_host))
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    # A thread of torch that waits for work must not spin for long on a core that another process needs. But to wake a
    # thread up takes longer than a short spin. 2,000 rounds take about 50 us. The threads of the C library spin 20 us.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    return threads


def start_rank(
    config: EngineConfig,
    resolved: ResolvedModel,
    shape: ModelShape,
    epoch: int,
    progress: Progress,
    host: HostMemoryPlace | None = None,
) -> tuple[LoadedRank, Runner[Any]]:
    """Returns the only rank of an engine, with a warmed-up runner. Raises ModelError or ConfigError.

    `host`: as for `load_rank`.
    """
    rank = load_rank(config, resolved, shape, progress, part=whole_part(shape.num_layers), host=host)
    runner = rank.runner(rank.kv.num_blocks, epoch, None)
    progress("warm_up", 0, 0, "")
    warm_up(runner, epoch)
    return rank, runner


def load_rank(
    config: EngineConfig,
    resolved: ResolvedModel,
    shape: ModelShape,
    progress: Progress,
    *,
    part: ModelPart,
    ranks_on_host: int = 1,
    host: HostMemoryPlace | None = None,
) -> LoadedRank:
    """Loads the weights of a rank's part of the model, and plans its KV cache. `LoadedRank.runner` allocates the cache.

    `ranks_on_host`: number of this engine's ranks that share this machine's cores and, on CPU, its memory. `host`: the
    place of the host memory for copies of KV blocks (kv_host_memory_bytes); None: it belongs to this process alone.
    Raises ModelError or ConfigError.
    """
    num_threads = set_threads(config, ranks_on_host)
    progress("import", 0, 0, "")
    with without_garbage_collection():
        from rayloom_engine.worker.loaded_rank import LoadedRank
        from rayloom_engine.worker.part_loading import PartToLoad, load_part

        if part.stage.count * part.shard.count > 1:
            _import_groups()

    forms = found_draft = None
    if part.stage.is_last and part.shard.is_first:  # this rank samples
        forms = forms_of(resolved, shape)
        found_draft = find_draft(config, resolved, shape, progress)
    loaded = load_part(PartToLoad(resolved.path, shape, part), config, num_threads, os.environ, progress)
    draft = None if found_draft is None else found_draft.load(num_threads, progress)
    if config.ranks_per_gpu > 1 and loaded.device_type == "cpu":
        logger.warning("ranks_per_gpu %d has no effect, because this rank computes on the CPU", config.ranks_per_gpu)
    return_free_memory()  # the memory of the plain matrices, which are not needed after they are packed
    progress("kv_cache", 0, 0, "")
    num_step_tokens = config.max_num_batched_tokens or (
        _CPU_STEP_TOKENS if loaded.device_type == "cpu" else _GPU_STEP_TOKENS
    )
    if config.enable_prompt_embeds:
        num_step_tokens = min(num_step_tokens, most_step_rows(shape.hidden_size))
    # Allocated before the KV cache is planned, so that the plan finds less free memory.
    host_memory = None
    if config.kv_host_memory_bytes:
        identity = model_identity(resolved, shape)
        host_memory = open_host_memory(config, loaded, identity, ranks_on_host, host or HostMemoryPlace())
    try:
        kv = _plan_cache(config, loaded, draft, num_step_tokens, ranks_on_host)
    except BaseException:
        if host_memory is not None:
            host_memory.file.remove()
        raise
    logger.info("%s", kv.explanation)
    return LoadedRank(
        loaded=loaded,
        kv=kv,
        num_step_tokens=num_step_tokens,
        forms=forms,
        ranks_per_gpu=config.ranks_per_gpu,
        draft=draft,
        host=host_memory,
    )


def forms_of(resolved: ResolvedModel, shape: ModelShape) -> Forms:
    """Returns the forms of a model. Does not read the vocabulary yet."""
    from rayloom_engine.worker.forms import Forms

    return Forms(partial(Vocabulary.load, resolved.path, shape.vocab_size, shape.eos_token_ids))


def _import_groups() -> None:
    """Imports torch and the modules with which a rank joins a process group.

    A rank imports these modules before it loads, because the later join waits only seconds for other ranks.
    """
    from rayloom_engine.parallel import (  # noqa: F401
        host_exchange,
        numpy_bridge,
        process_group,
        process_link,
        shared_sums,
    )


def _plan_cache(
    config: EngineConfig, loaded: LoadedPart, draft: LoadedPart | None, num_step_tokens: int, ranks_on_host: int
) -> KvPlan:
    """Plans the KV cache that fits into the memory left beside the loaded weights. Raises ConfigError.

    A block has the KV of its tokens in both models, if this rank has a draft model.
    """
    shape = loaded.shape
    parts = [loaded] if draft is None else [loaded, draft]
    is_cpu = loaded.device_type == "cpu"
    demand = KvDemand(
        block_bytes=sum(part.kv_layout.block_bytes(BLOCK_SIZE, part.kv_element_bytes) for part in parts),
        sequence=SequenceBlocks(block_size=BLOCK_SIZE, window=shape.attention_span, num_step_tokens=num_step_tokens),
        max_num_seqs=config.max_num_seqs,
        model_max_len=shape.max_position_embeddings,
        max_model_len=config.max_model_len,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_kv_blocks=config.num_kv_blocks,
    )
    # A step has at most `max_num_seqs` rows of logits, or the rows of one draft if these are more.
    num_drafted = config.num_speculative_tokens if config.speculation != "off" else 0
    num_rows = max(config.max_num_seqs, 1 + num_drafted)
    num_sharing = ranks_on_host * config.engines_on_host if is_cpu else config.ranks_per_gpu
    free_bytes = loaded.free_bytes(num_sharing)
    # Without a window, no context is longer than the free memory has KV blocks.
    most_len = free_bytes // demand.block_bytes * BLOCK_SIZE if shape.attention_span is None else demand.wanted_len
    step = LargestStep(num_tokens=num_step_tokens, num_rows=num_rows, context_len=min(demand.wanted_len, most_len))
    step_bytes = loaded.step_bytes(step)
    if draft is not None:
        held = held_bytes(step, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
        step_bytes = with_draft_model(step_bytes, draft.step_bytes(step), held)
    embeds_bytes = embeds_step_bytes(shape, num_step_tokens) if config.enable_prompt_embeds else 0
    memory = RankMemory(
        free_bytes=free_bytes,
        is_cpu=is_cpu,
        step_bytes=step_bytes.usual + embeds_bytes,
        most_step_bytes=step_bytes.most + embeds_bytes,
        adapters_bytes=_adapters_bytes(config, loaded, num_step_tokens),
        ranks_on_host=num_sharing,
    )
    return plan_kv_memory(demand, memory)


def _adapters_bytes(config: EngineConfig, loaded: LoadedPart, num_step_tokens: int) -> int:
    """Returns the bytes of adapters and their buffers. Raises ConfigError if the rank cannot compute adapters."""
    if not config.takes_adapters:
        return 0
    if loaded.device_type != "cpu":
        raise ConfigError(
            f"adapters: LoRA adapters work on CPU only, and this rank computes on {loaded.device_type}; "
            f"{REMOVE_IN_WORDS}, or merge an adapter into the model"
        )
    of_step = num_step_tokens * adapter_token_bytes(loaded.shape, loaded.part.shard.count)
    num_bytes = config.max_loras * loaded.adapter_bytes(config.max_lora_rank) + of_step
    logger.info(
        "LoRA adapters: %.2f GiB are kept free for %d of rank %d or less",
        num_bytes / GIB,
        config.max_loras,
        config.max_lora_rank,
    )
    return num_bytes


def warm_up(runner: Runner[Any], epoch: int) -> None:
    """Runs a prefill and a decode step in block 0, so that lazy initialisation does not delay the first request.

    If there are several ranks, all of them must call this at the same time. Raises ConfigError if the draft model
    fails in the first epoch: the engine would never draft, and the draft model would only take memory. In a later epoch
    the engine has sequences to continue, and answers without drafts are better than no answers.
    """
    new = NewSlot(
        slot=0,
        request_id="warm-up",
        token_ids=(0, 0),
        num_prompt_tokens=2,
        block_table=(0,),
        params=DecodingParams(max_tokens=2, temperature=0.0),
        eos_token_ids=(),
    )
    prefill = SlotStep(slot=0, start=0, num_tokens=2, samples=True)
    decode = SlotStep(slot=0, start=2, num_tokens=1, new_token_ids=(0,), samples=True, num_proposals=2)
    runner.run(StepPlan(step_id=0, epoch=epoch, new_slots=(new,), slots=(prefill,)))
    runner.run(StepPlan(step_id=0, epoch=epoch, slots=(decode,)))
    runner.forget_all()
    if runner.draft_failure is not None and epoch == FIRST_EPOCH:
        raise ConfigError(
            f"draft_model: its first step has failed: {runner.draft_failure!r}; choose another draft model, leave it "
            "more memory, or set speculation to ngram or off"
        ) from runner.draft_failure
