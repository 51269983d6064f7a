"""A rank's host memory for copies of KV blocks: its size, its file, and the identity by which the core knows it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

from rayloom_engine.config import BLOCK_SIZE, EngineConfig
from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.kv.host_file import HostFile, allocated_bytes, file_name, remove_stale_files, seconds_to_room
from rayloom_engine.kv.host_plan import num_host_slots
from rayloom_engine.kv.memory import GIB
from rayloom_engine.models.content_hash import content_hash
from rayloom_engine.worker.machine import free_memory_bytes

if TYPE_CHECKING:
    from rayloom_engine.models.checkpoint.source import ResolvedModel
    from rayloom_engine.models.shape import ModelShape
    from rayloom_engine.worker.computation import LoadedPart

logger = logging.getLogger(__name__)

_STALE_MARGIN_S = 1.0  # clocks of files are coarser than those of processes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryPlace:
    """The place of a rank's host memory. Without a token, the memory ends with the process."""

    token: str = field(default="", repr=False)  # the engine's token, from which the file's name is made
    rank: int = 0
    # False for a rank that replaces another. If it has no room for the memory, the engine makes no copies.
    is_required: bool = True


@dataclass(slots=True)
class RankHostMemory:
    file: HostFile
    num_slots: int
    is_pinned: bool | None = None  # whether a GPU has pinned it; None: nobody has tried

    @property
    def memory(self) -> memoryview:
        return self.file.memory


def open_host_memory(
    config: EngineConfig, loaded: LoadedPart, model: str, ranks_on_host: int, place: HostMemoryPlace
) -> RankHostMemory | None:
    """Returns the memory of a rank, with the copies of the rank that it replaces. `model`: the model's identity.

    Raises ConfigError if there is too little memory; returns None in this case if the memory is not required.
    """
    remove_stale_files()
    while True:
        try:
            return _opened(config, loaded, model, ranks_on_host, place)
        except ConfigError as error:
            if _try_make_room(place):
                continue
            if place.is_required:
                raise
            logger.warning("no copies of KV blocks in host memory from now on: %s", error)
            return None


def _try_make_room(place: HostMemoryPlace) -> bool:
    """Removes files that dead engines have left; waits until they are old enough. Returns False if it removed none."""
    seconds = seconds_to_room(place.token)
    if seconds is None or (seconds > 0 and not place.is_required):
        return False
    if seconds > 0:
        logger.warning("waiting %.0f s, because a dead engine may have left files in the host memory", seconds)
        sleep(seconds + _STALE_MARGIN_S)
    return remove_stale_files(token_without_room=place.token) > 0


def _opened(
    config: EngineConfig, loaded: LoadedPart, model: str, ranks_on_host: int, place: HostMemoryPlace
) -> RankHostMemory:
    block_bytes = loaded.kv_layout.block_bytes(BLOCK_SIZE, loaded.kv_element_bytes)
    num_slots = num_host_slots(
        config.kv_host_memory_bytes,
        block_bytes,
        free_bytes=free_memory_bytes(),
        allocated_bytes=allocated_bytes(place.token if config.engines_on_host == 1 else None),
        ranks_on_host=ranks_on_host * config.engines_on_host,
    )
    name = file_name(place.token, f"rank{place.rank}") if place.token else None
    file = _open(name, _purpose(loaded, model), num_slots * block_bytes)
    size = num_slots * block_bytes / GIB
    logger.info("host memory: room for copies of %d KV blocks, %.2f GiB", num_slots, size)
    return RankHostMemory(file, num_slots)


def model_identity(resolved: ResolvedModel, shape: ModelShape) -> str:
    """Returns a text that differs for models, and for versions of the engine, whose keys and values may differ.

    A local folder may have other files at the next start of this process. So the text has a hash of samples of them, as
    in an engine's fingerprint. It also has their times, which tell of changes outside the samples. Raises ModelError.
    """
    try:
        content = resolved.commit or [content_hash(resolved.path), _times(resolved.path)]
    except OSError as error:
        raise ModelError(f"{resolved.path} cannot be read: {error}") from error
    return json.dumps([shape.architecture, content, shape.rope.context_len, version("rayloom-engine")])


def _times(folder: Path) -> list[tuple[str, int]]:
    return [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))]


def _open(name: str | None, purpose: str, num_bytes: int) -> HostFile:
    try:
        return HostFile.open(name, purpose, num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"kv_host_memory_bytes: {num_bytes / GIB:.2f} GiB of shared memory (/dev/shm) cannot be allocated "
            f"({error}); lower kv_host_memory_bytes, or enlarge /dev/shm (for example docker run --shm-size)"
        ) from error


def _purpose(loaded: LoadedPart, model: str) -> str:
    """Returns a text with all facts on which the content of copies depends, so that no other rank uses them."""
    part = loaded.part
    return json.dumps(
        {
            "model": model,
            "stage": [part.stage.index, part.stage.count],
            "shard": [part.shard.index, part.shard.count],
            "sizes": loaded.kv_layout.sizes,
            "block_size": BLOCK_SIZE,
            "dtype": loaded.dtype,
            "compute_dtype": loaded.compute_dtype,
            "quantization": loaded.quantization,
            "arithmetic": loaded.arithmetic,
        }
    )
