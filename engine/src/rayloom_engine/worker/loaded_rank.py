"""A rank with its weights in memory. They outlive its runners: a rebuild of the engine loads nothing again."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.errors import ConfigError
from rayloom_engine.kernels.kv_cache import KvCache
from rayloom_engine.models.decoder import CausalLM
from rayloom_engine.parallel.process_group import ProcessTensorGroup
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.shared_sums import SharedTensorGroup
from rayloom_engine.parallel.stage import Stage
from rayloom_engine.parallel.stage_link import ProcessGroupLink, StageLink
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup
from rayloom_engine.worker.activity import Activity, WatchedGroup, WatchedLink
from rayloom_engine.worker.device import DeviceChoice
from rayloom_engine.worker.kv_memory import GIB, KvPlan
from rayloom_engine.worker.runner import Runner

logger = logging.getLogger(__name__)


class LoadedRank:
    def __init__(self, *, model: CausalLM, choice: DeviceChoice, kv: KvPlan, num_step_tokens: int) -> None:
        self.kv = kv  # what this rank alone could hold; with several, the least of all counts
        self.num_step_tokens = num_step_tokens
        self.device_type = choice.device.type
        self.dtype = str(choice.dtype).removeprefix("torch.")
        self.compute_dtype = str(choice.compute_dtype).removeprefix("torch.")
        self.weight_bytes = model.weight_bytes
        self.num_bytes_read = model.num_bytes_read  # of weights, from files, by this process
        self.activity = Activity()
        self._model = model
        self._choice = choice
        self._cache: KvCache | None = None

    @property
    def stage(self) -> Stage:
        return self._model.stage

    @property
    def shard(self) -> Shard:
        return self._model.shard

    def link(self) -> ProcessGroupLink | None:
        """The link over the process group that this process has joined; None for a model in one stage."""
        if self.stage.count == 1:
            return None
        return ProcessGroupLink(
            self._model.shape.hidden_size,
            self._choice.compute_dtype,
            self._choice.device,
            previous_rank=(self.stage.index - 1) * self.shard.count + self.shard.index,
            next_rank=(self.stage.index + 1) * self.shard.count + self.shard.index,
            depth=self.stage.count,
        )

    def tensor_group(self, stage_group: dist.ProcessGroup | None) -> TensorGroup | None:
        """What `join_group` returned, as the model uses it; None for a rank that has its layers for itself."""
        if stage_group is None:
            return None
        widths = self.shard.widths(self._model.shape.vocab_size)
        if self.device_type == "cpu":
            try:
                return SharedTensorGroup(stage_group, widths)
            except OSError as error:
                logger.info("the ranks of this stage sum over gloo, not in shared memory: %s", error)
        return ProcessTensorGroup(stage_group, widths)

    def runner(self, num_blocks: int, epoch: int, link: StageLink | None, group: TensorGroup | None = None) -> Runner:
        """A runner with empty slots; drop the one before it. The KV cache is allocated on the first call and kept.

        Raises ConfigError when the memory cannot be had.
        """
        if self._cache is None or self._cache.num_blocks != num_blocks:
            self._cache = None  # its memory goes first
            self._cache = self._allocate(num_blocks)
        self.activity.advance = 0  # all ranks begin an epoch together, so from here on their counts compare
        watched = None if link is None else WatchedLink(link, self.activity)
        if group is not None or self.shard.count == 1:
            group = WatchedGroup(group or OneRank(), self.activity)
        return Runner(self._model, self._cache, self._choice.device, epoch, watched, group)

    def _allocate(self, num_blocks: int) -> KvCache:
        try:
            return KvCache.allocate(
                num_layers=len(self.stage.layers),
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                num_kv_heads=len(self.shard.kv_heads(self._model.shape.num_kv_heads)),
                head_dim=self._model.shape.head_dim,
                # The weights' type, also where the arithmetic is wider: half the memory for a context.
                dtype=self._choice.dtype,
                device=self._choice.device,
            )
        except (OSError, MemoryError, OverflowError, ValueError, torch.OutOfMemoryError) as error:
            size = num_blocks * self.kv.block_bytes / GIB
            raise ConfigError(
                f"{num_blocks} KV blocks, {size:.2f} GiB: this much memory cannot be had ({error}); "
                "lower kv_cache_memory_bytes, num_kv_blocks or max_num_seqs"
            ) from error
