"""Loads a rank's part of a model on the C library or on torch, and imports only the modules that the choice needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rayloom_engine.common.process import without_garbage_collection
from rayloom_engine.config import INT8_GROUP, EngineConfig, Quantization
from rayloom_engine.kernels.backend import parse_backend
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.models.checkpoint.source import cache_folder
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.worker.cpu_backend import LibraryChoice, ModelOnCpu, check_quantization, choose_cpu_library
from rayloom_engine.worker.device import choose_device, choose_weight_type

if TYPE_CHECKING:
    from rayloom_engine.worker.computation import LoadedPart

logger = logging.getLogger(__name__)

_KERNELS_VARIABLE = "RAYLOOM_KERNELS"  # kernel backend: auto, plain, reference or triton


@dataclass(frozen=True, slots=True)
class PartToLoad:
    """A rank's part of a model in a Hugging Face folder."""

    folder: Path
    shape: ModelShape
    part: ModelPart


def load_part(
    wanted: PartToLoad, config: EngineConfig, num_threads: int, environ: Mapping[str, str], progress: Progress
) -> LoadedPart:
    """Chooses device, types and kernels, logs them, and loads the weights. Raises ModelError or ConfigError.

    `num_threads`: compute threads of this process.
    """
    longest = config.max_model_len or wanted.shape.max_position_embeddings
    device = choose_device(config.device, _has_cuda)
    dtype = choose_weight_type(config.dtype, wanted.shape.checkpoint_dtype)
    if device == "cpu" and config.dtype == "auto" and dtype == "float16" and wanted.shape.scheme is not None:
        dtype = "bfloat16"  # the type of weights that are not quantised; the C library has no float16
    backend = parse_backend(environ.get(_KERNELS_VARIABLE, ""))
    chosen = LibraryChoice(None)
    if device == "cpu":
        on_cpu = ModelOnCpu(
            shape=wanted.shape,
            num_shards=wanted.part.shard.count,
            dtype=dtype,
            cut_unit=_cut_unit(wanted.shape, config.quantization),
        )
        cache = cache_folder(environ)
        chosen = choose_cpu_library(on_cpu, backend, num_threads=num_threads, cache=cache, environ=environ)
    check_quantization(config.quantization, device, chosen)
    if chosen.library is not None:
        with without_garbage_collection():
            from rayloom_engine.worker.library_computation import load_library_part, weight_format

        form = weight_format(chosen.library, dtype, config.quantization)
        logger.info("device cpu, %d threads; %s", num_threads, form.description)
        if wanted.shape.scheme is not None and config.quantization != "auto":
            logger.warning(
                "the checkpoint's quantised weights (%s) become %s, because the setting quantization is %s",
                wanted.shape.scheme.label,
                "int8" if config.quantization == "int8" else form.dtype,
                config.quantization,
            )
        logger.info("kernels: C library on cpu, %s, %s", form.dtype, form.library.description)
        return load_library_part(wanted.folder, wanted.shape, form, wanted.part, progress)
    with without_garbage_collection():
        from rayloom_engine.worker.torch_computation import DecodeLimits, choose_types, load_torch_part, make_kernels

    types = choose_types(device, dtype)
    of_checkpoint = f"checkpoint is {dtype}; " if config.dtype == "auto" else ""
    logger.info("device %s, %d threads; %s%s", device, num_threads, of_checkpoint, types.reason)
    if chosen.problem:
        logger.warning(
            "torch computes this model, which is slower, and an answer may depend on the other requests of a step: the "
            "CPU library is not used, because %s",
            chosen.problem,
        )
    if wanted.shape.scheme is not None:
        logger.warning(
            "the checkpoint's quantised weights (%s) become %s, because only the CPU library multiplies by them",
            wanted.shape.scheme.label,
            types.compute_dtype,
        )
    kernels = make_kernels(device, types, backend, num_threads)
    logger.info("%s", kernels.description)
    limits = DecodeLimits(max_num_seqs=config.max_num_seqs, max_context_len=longest) if device == "cuda" else None
    return load_torch_part(wanted, kernels, types, limits, progress)


def _cut_unit(shape: ModelShape, quantization: Quantization) -> int:
    if quantization == "auto":
        return 1 if shape.scheme is None else shape.scheme.cut_unit
    return INT8_GROUP if quantization == "int8" else 1


def _has_cuda() -> bool:
    with without_garbage_collection():
        from rayloom_engine.worker.torch_computation import has_cuda

    return has_cuda()
