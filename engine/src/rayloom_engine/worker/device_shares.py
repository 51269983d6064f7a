"""Devices of the ranks on a machine: each rank has one of its own, or shares it (setting ranks_per_gpu). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError
from rayloom_engine.gpu_sharing import shareable_numbers, sharing_advice


def rank_devices(
    config: EngineConfig, devices: Sequence[str], num_ranks: int, *, subject: str, remedy: str
) -> list[str]:
    """Returns the device of each of a machine's `num_ranks` ranks. Empty without `devices`: ranks compute on the CPU.

    Ranks that follow each other share a device. Raises ConfigError if there are too few devices. `subject`: the
    settings that the error is about. `remedy`: the first remedy that the error names.
    """
    if not devices:
        return []
    per_gpu = config.ranks_per_gpu
    num_needed = -(-num_ranks // per_gpu)
    if len(devices) >= num_needed:
        return [devices[rank // per_gpu] for rank in range(num_ranks)]
    need = "need an accelerator each" if per_gpu == 1 else f"need {num_needed} accelerators, {per_gpu} ranks on each"
    # There is always one: the greatest possible number is that of all ranks, and no machine has more ranks than that.
    numbers = shareable_numbers(config.tensor_parallel_size, config.pipeline_parallel_size)
    enough = next(number for number in numbers if number * len(devices) >= num_ranks)
    raise ConfigError(
        f"{subject}: {num_ranks} ranks {need}, and this machine has {len(devices)}; {remedy}, set device to cpu, "
        f"{sharing_advice(enough)}"
    )
