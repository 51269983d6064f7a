"""Settings that exclude each other, or need each other. Pure.

config.py checks each setting alone; ranks check the settings that depend on the model or on the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayloom_engine.errors import ConfigError
from rayloom_engine.gpu_sharing import gpu_per_rank, ranks_on_gpu, shareable_numbers

if TYPE_CHECKING:
    from rayloom_engine.config import EngineConfig


def check_conflicts(config: EngineConfig) -> None:
    """Raises ConfigError if two settings exclude each other, or if a setting that another needs is missing."""
    if config.executor == "uni" and config.world_size > 1:
        raise ConfigError(
            f"EngineConfig: executor: 'uni' has one rank, but {config.parallelism} needs {config.world_size}; "
            "use mp, ray or auto"
        )
    if config.ngram_min > config.ngram_max:
        raise ConfigError(
            f"EngineConfig: ngram_min: {config.ngram_min} is more than ngram_max {config.ngram_max}; "
            "lower it, or raise ngram_max"
        )
    if config.heartbeat_seconds > config.hang_seconds / 2:
        raise ConfigError(
            f"EngineConfig: heartbeat_seconds: {config.heartbeat_seconds:g} is more than half of hang_seconds "
            f"{config.hang_seconds:g}; lower it, or raise hang_seconds"
        )
    if config.front_port is not None and config.front_key_file is None:
        raise ConfigError(
            f"EngineConfig: front_key_file: front_port is {config.front_port}, so a key is needed; set front_key_file "
            "to a file with at least 16 random characters, or remove front_port"
        )
    if config.front_tls_paths is not None and config.front_port is None:
        raise ConfigError(
            "EngineConfig: front_tls_cert_file: TLS is for the port for gateways, and front_port is not set; set it, "
            "or remove the front_tls settings"
        )
    if config.managed_adapters and config.allow_runtime_lora_updating:
        raise ConfigError(
            "EngineConfig: allow_runtime_lora_updating: managed_adapters lets only the admin port change the adapters; "
            "remove one of the two"
        )
    if config.kv_host_memory_bytes and not config.enable_prefix_caching:
        raise ConfigError(
            f"EngineConfig: kv_host_memory_bytes: {config.kv_host_memory_bytes} bytes for copies of cached blocks, but "
            "enable_prefix_caching is false; remove one of the two"
        )
    if config.quantization == "int8":
        _check_quantization(config, "quantization")
    if config.ranks_per_gpu > 1:
        _check_shared_gpus(config)
    if config.ray_resources_per_rank is not None and config.world_size > 1 and config.device != "cpu":
        _check_gpu_of_rank(config.ray_resources_per_rank.get("GPU"), config.ranks_per_gpu)
    _check_draft_model(config)
    if config.device == "cuda" and "GPU" not in (config.ray_resources_per_rank or {"GPU": 1.0}):
        raise ConfigError("EngineConfig: ray_resources_per_rank: device 'cuda' needs a GPU; add \"GPU\": 1")


def _check_shared_gpus(config: EngineConfig) -> None:
    """Raises ConfigError if ranks cannot share GPUs as ranks_per_gpu demands."""
    given = f"EngineConfig: ranks_per_gpu: {config.ranks_per_gpu}"
    if config.device == "cpu":
        raise ConfigError(f"{given} is for ranks on GPUs, and device is 'cpu'; remove one of the two")
    if config.world_size == 1:
        raise ConfigError(f"{given}, but there is one rank; remove it, or raise tensor_ or pipeline_parallel_size")
    numbers = shareable_numbers(config.tensor_parallel_size, config.pipeline_parallel_size)
    if config.ranks_per_gpu not in numbers:
        *others, most = numbers
        raise ConfigError(
            f"{given}: the {config.world_size} ranks of {config.parallelism} cannot share GPUs evenly, with one stage "
            f"or whole stages on each; use {', '.join(map(str, others))} or {most}"
        )


def _check_gpu_of_rank(amount: float | None, ranks_per_gpu: int) -> None:
    """Raises ConfigError if Ray would put another number of ranks on a GPU than ranks_per_gpu.

    Each rank plans for 1 / ranks_per_gpu of the GPU's memory. `amount`: GPU of ray_resources_per_rank.
    """
    part = gpu_per_rank(ranks_per_gpu)
    if amount is None:
        if ranks_per_gpu > 1:
            raise ConfigError(
                f"EngineConfig: ray_resources_per_rank: ranks_per_gpu {ranks_per_gpu} needs a part of a GPU for each "
                f'rank; add "GPU": {part:g}'
            )
    elif ranks_per_gpu == 1:
        if amount < 1:
            raise ConfigError(
                f"EngineConfig: ray_resources_per_rank: with GPU {amount:g}, ranks could share a GPU, and "
                "ranks_per_gpu is 1; use 1, or set ranks_per_gpu to the number of ranks on a GPU"
            )
    elif amount > 1 or ranks_on_gpu(amount) != ranks_per_gpu:
        raise ConfigError(
            f"EngineConfig: ray_resources_per_rank: with GPU {amount:g}, Ray does not put {ranks_per_gpu} ranks on a "
            f"GPU, as ranks_per_gpu demands; use at most {part:g} and more than 1/{ranks_per_gpu + 1}, or leave "
            "ray_resources_per_rank out"
        )


def _check_draft_model(config: EngineConfig) -> None:
    """Raises ConfigError if only one of `speculation: draft` and `draft_model` is given, or if they exclude others."""
    if config.speculation == "draft" and config.draft_model is None:
        raise ConfigError(
            "EngineConfig: draft_model: speculation is 'draft', so a draft model is needed; set draft_model to a small "
            "model with the same tokenizer, or use speculation ngram"
        )
    if config.speculation == "draft":
        if config.draft_quantization == "int8":
            _check_quantization(config, "draft_quantization")
        return
    if config.draft_model is not None:
        raise ConfigError(
            f"EngineConfig: draft_model: it has no effect, because speculation is {config.speculation!r}; set "
            "speculation to draft, or remove draft_model"
        )
    given = {"draft_revision": config.draft_revision is not None}
    given["draft_quantization"] = config.draft_quantization != "auto"
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"EngineConfig: {name}: it is for a draft model, and speculation is {config.speculation!r}; "
                "remove it, or set speculation to draft and draft_model"
            )


def _check_quantization(config: EngineConfig, name: str) -> None:
    """Raises ConfigError for settings that exclude int8 weights. Ranks check what depends on model or machine.

    `name`: the setting that is int8.
    """
    if config.device == "cuda":
        raise ConfigError(
            f"EngineConfig: {name}: 'int8' works on CPU only, and device is 'cuda'; remove one of the two"
        )
    if config.dtype == "float16":
        raise ConfigError(
            f"EngineConfig: {name}: 'int8' works with dtype bfloat16 or float32, and dtype is "
            "'float16'; change one of the two"
        )
