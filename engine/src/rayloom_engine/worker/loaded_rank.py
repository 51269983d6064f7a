"""LoadedRank: a rank's weights in memory. A rebuild of the engine makes a new Runner and keeps the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayloom_engine.errors import ConfigError
from rayloom_engine.kv.memory import GIB, KvPlan
from rayloom_engine.parallel.backend import choose_backend
from rayloom_engine.parallel.group_abort import GroupAbort
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import Stage
from rayloom_engine.parallel.stage_link import StageLink
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup
from rayloom_engine.worker.activity import Activity, WatchedGroup, WatchedLink
from rayloom_engine.worker.computation import LoadedPart, RankComputation
from rayloom_engine.worker.draft_model import DraftLimits, DraftModel
from rayloom_engine.worker.forms import Forms
from rayloom_engine.worker.host_memory import RankHostMemory
from rayloom_engine.worker.runner import Runner

if TYPE_CHECKING:
    from rayloom_engine.parallel.process_group import StageGroup


class LoadedRank:
    def __init__(
        self,
        *,
        loaded: LoadedPart,
        kv: KvPlan,
        num_step_tokens: int,
        forms: Forms | None = None,
        ranks_per_gpu: int = 1,
        draft: LoadedPart | None = None,
        host: RankHostMemory | None = None,
    ) -> None:
        """`forms`, `draft`: None, except on the rank that samples. `draft`: the draft model, if there is one.

        `ranks_per_gpu`: the setting. `host`: memory for copies of KV blocks; None: no copies.
        """
        self.loaded = loaded
        self.host = host
        self.kv = kv  # the KV cache that fits on this rank; all ranks use the size of the smallest
        self.num_step_tokens = num_step_tokens
        self.device_type = loaded.device_type
        self.backend = choose_backend(loaded.device_type, ranks_per_gpu)  # of the process group that this rank joins
        # True if gloo, which exchanges CPU tensors, must exchange tensors of another device.
        self.exchanges_on_host = self.backend == "gloo" and loaded.device_type != "cpu"
        self.dtype = loaded.dtype
        self.quantization = loaded.quantization
        self.compute_dtype = loaded.compute_dtype
        self.hidden_dtype = loaded.hidden_dtype
        self.arithmetic = loaded.arithmetic
        parts = [loaded] if draft is None else [loaded, draft]
        self.weight_bytes = sum(part.weight_bytes for part in parts)
        self.num_bytes_read = sum(part.num_bytes_read for part in parts)  # weights that this process read from files
        self.activity = Activity(lambda: sum(part.progress for part in parts))
        self.draft = draft
        self.forms = forms
        self._computation: RankComputation[Any] | None = None
        self._draft_computation: RankComputation[Any] | None = None
        if forms is not None:
            forms.report_to(self.activity.report)

    @property
    def stage(self) -> Stage:
        return self.loaded.part.stage

    @property
    def shard(self) -> Shard:
        return self.loaded.part.shard

    def link(self) -> StageLink[Any] | None:
        """Returns the link to the neighbour stages; None if the model has one stage. `runner` takes it.

        This process must have joined the process group.
        """
        stage = self.stage
        if stage.count == 1:
            return None
        from rayloom_engine.parallel.process_link import HiddenStates, ProcessGroupLink

        part = self.loaded.part
        device_type = "cpu" if self.exchanges_on_host else self.device_type
        link = ProcessGroupLink(
            HiddenStates.of(self.loaded.shape.hidden_size, self.hidden_dtype, device_type),
            previous_rank=part.rank_in(stage.index - 1),
            next_rank=part.rank_in(stage.index + 1),
            depth=stage.count,
        )
        if not self.loaded.has_numpy_arrays:
            return link
        from rayloom_engine.parallel.numpy_bridge import NumpyLink

        return NumpyLink(link)

    def tensor_group(self, stage_group: StageGroup | None, group_abort: GroupAbort) -> TensorGroup[Any] | None:
        """Returns the TensorGroup over the group that `join_group` returned; None for a stage of one rank.

        `runner` takes it. `group_abort` can end the waits of the TensorGroup.
        """
        if stage_group is None:
            return None
        from rayloom_engine.parallel.shared_sums import make_tensor_group

        widths = self.shard.widths(self.loaded.shape.vocab_size)
        group = make_tensor_group(stage_group, widths, self.backend, group_abort)
        if not self.loaded.has_numpy_arrays:
            return group
        from rayloom_engine.parallel.numpy_bridge import NumpyGroup

        return NumpyGroup(group)

    def runner(
        self, num_blocks: int, epoch: int, link: StageLink[Any] | None, group: TensorGroup[Any] | None = None
    ) -> Runner[Any]:
        """Returns a new Runner with empty slots. Drop the previous Runner before the call.

        The first call allocates the KV cache. Raises ConfigError if the memory cannot be allocated.
        """
        if self._computation is None or self._computation.num_blocks != num_blocks:
            # frees the memory of the caches before new caches are allocated
            self._computation = self._draft_computation = None
            self._computation = self._allocate(self.loaded, num_blocks)
            if self.host is not None:
                self._computation.use_host_memory(self.host)
            if self.draft is not None:
                # The logits of both models have a column for each token id of the served model.
                self._draft_computation = self._allocate(self.draft, num_blocks, self.loaded.shape.vocab_size)
        if self.forms is not None:
            self.forms.load_when_idle(lambda: self.activity.advance)
        self.activity.restart()  # all ranks begin an epoch together, so their counts can be compared from here on
        watched_link = self._watched_link(link) if link is not None else None
        watched_group = self._watched_group(group) if group is not None else None
        if self.shard.count == 1:
            watched_group = WatchedGroup(OneRank(), self.activity)
        loaded = self.loaded
        runner = Runner(self._computation, loaded.shape, loaded.part, epoch, watched_link, watched_group, self.forms)
        if self.draft is not None and self._draft_computation is not None:
            limits = DraftLimits(
                max_positions=self.draft.shape.max_position_embeddings,
                max_tokens=self.num_step_tokens,
                window=loaded.shape.attention_span,
                num_ids=min(loaded.shape.vocab_size, self.draft.shape.vocab_size),
            )
            alone: WatchedGroup[Any] = WatchedGroup(OneRank(), self.activity)
            runner.draft_model = DraftModel(self._draft_computation, limits, alone)
        return runner

    def _watched_link(self, link: StageLink[Any]) -> StageLink[Any]:
        """Returns a link for the arrays of this rank. The activity counts its waits for other ranks.

        A copy to host memory waits for this rank's own device, so the activity does not count it.
        """
        watched = WatchedLink(link, self.activity)
        if not self.exchanges_on_host:
            return watched
        from rayloom_engine.parallel.host_exchange import HostLink

        return HostLink(watched, self.device_type)

    def _watched_group(self, group: TensorGroup[Any]) -> TensorGroup[Any]:
        """Returns a group for the arrays of this rank, as `_watched_link` does."""
        watched = WatchedGroup(group, self.activity)
        if not self.exchanges_on_host:
            return watched
        from rayloom_engine.parallel.host_exchange import HostGroup

        return HostGroup(watched)

    def _allocate(self, part: LoadedPart, num_blocks: int, num_columns: int | None = None) -> RankComputation[Any]:
        try:
            return part.computation(num_blocks, num_columns)
        except (OSError, MemoryError, OverflowError, ValueError) as error:
            size = num_blocks * self.kv.block_bytes / GIB
            raise ConfigError(
                f"{num_blocks} KV blocks, {size:.2f} GiB: this much memory cannot be allocated ({error}); "
                "lower kv_cache_memory_bytes, num_kv_blocks or max_num_seqs"
            ) from error
