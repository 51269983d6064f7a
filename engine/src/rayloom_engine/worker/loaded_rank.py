"""LoadedRank: a rank's weights in memory. A rebuild of the engine makes a new Runner and keeps the weights."""

from __future__ import annotations

import torch

from rayloom_engine.config import BLOCK_SIZE, Quantization
from rayloom_engine.errors import ConfigError
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.memory import GIB, KvPlan
from rayloom_engine.models.loader import LoadedModel
from rayloom_engine.parallel.process_group import StageGroup
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.shared_sums import make_tensor_group
from rayloom_engine.parallel.stage import Stage
from rayloom_engine.parallel.stage_link import HiddenStates, ProcessGroupLink, StageLink
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup
from rayloom_engine.worker.activity import Activity, WatchedGroup, WatchedLink
from rayloom_engine.worker.device import DeviceChoice
from rayloom_engine.worker.forms import Forms
from rayloom_engine.worker.runner import Runner


class LoadedRank:
    def __init__(
        self,
        *,
        loaded: LoadedModel,
        choice: DeviceChoice,
        quantization: Quantization,
        kv: KvPlan,
        num_step_tokens: int,
        forms: Forms | None = None,
    ) -> None:
        """`forms`: only of the rank that samples."""
        self.kv = kv  # the KV cache that fits on this rank; the engine uses the smallest of all ranks
        self.num_step_tokens = num_step_tokens
        self.device_type = choice.device.type
        self.dtype = str(choice.dtype).removeprefix("torch.")
        self.quantization = quantization
        self.compute_dtype = str(choice.compute_dtype).removeprefix("torch.")
        self.hidden_dtype = str(loaded.model.hidden_dtype).removeprefix("torch.")
        library = loaded.model.kernels.target.library
        self.arithmetic = "torch" if library is None else f"C library, {library.instruction_set}"
        self.weight_bytes = loaded.model.weight_bytes
        self.num_bytes_read = loaded.num_bytes_read  # bytes of weights that this process read from files
        self.activity = Activity(lambda: loaded.model.progress)
        self._model = loaded.model
        self._choice = choice
        self._forms = forms
        self._cache: KvPages | None = None
        if forms is not None:
            forms.report_to(self.activity.report)

    @property
    def stage(self) -> Stage:
        return self._model.part.stage

    @property
    def shard(self) -> Shard:
        return self._model.part.shard

    def link(self) -> ProcessGroupLink | None:
        """Returns the link to the neighbour stages; None if the model has one stage.

        This process must have joined the process group.
        """
        stage = self.stage
        if stage.count == 1:
            return None
        form = HiddenStates(
            hidden_size=self._model.shape.hidden_size, dtype=self._model.hidden_dtype, device=self._choice.device
        )
        part = self._model.part
        return ProcessGroupLink(
            form,
            previous_rank=part.rank_in(stage.index - 1),
            next_rank=part.rank_in(stage.index + 1),
            depth=stage.count,
        )

    def tensor_group(self, stage_group: StageGroup | None) -> TensorGroup | None:
        """Returns the TensorGroup over the group that `join_group` returned; None for a stage of one rank."""
        if stage_group is None:
            return None
        widths = self.shard.widths(self._model.shape.vocab_size)
        return make_tensor_group(stage_group, widths, self.device_type)

    def runner(self, num_blocks: int, epoch: int, link: StageLink | None, group: TensorGroup | None = None) -> Runner:
        """Returns a new Runner with empty slots. Drop the previous Runner before the call.

        The first call allocates the KV cache. Raises ConfigError if the memory cannot be allocated.
        """
        if self._cache is None or self._cache.num_blocks != num_blocks:
            self._cache = None  # frees its memory before the new cache is allocated
            self._cache = self._allocate(num_blocks)
        if self._forms is not None:
            self._forms.load_when_idle(lambda: self.activity.advance)
        self.activity.restart()  # all ranks begin an epoch together, so their counts can be compared from here on
        watched = None if link is None else WatchedLink(link, self.activity)
        if group is not None or self.shard.count == 1:
            group = WatchedGroup(group or OneRank(), self.activity)
        return Runner(self._model, self._cache, epoch, watched, group, self._forms)

    def _allocate(self, num_blocks: int) -> KvPages:
        try:
            return KvPages.allocate(
                self._model.kv_layout,
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                # The weights' type, even if the compute type is wider: this takes half of the memory.
                dtype=self._choice.dtype,
                device=self._choice.device,
            )
        except (OSError, MemoryError, OverflowError, ValueError, torch.OutOfMemoryError) as error:
            size = num_blocks * self.kv.block_bytes / GIB
            raise ConfigError(
                f"{num_blocks} KV blocks, {size:.2f} GiB: this much memory cannot be allocated ({error}); "
                "lower kv_cache_memory_bytes, num_kv_blocks or max_num_seqs"
            ) from error
