"""RankModel on the modules of transformers.

Legend: T tokens of the step, D model width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rayloom_engine.kernels.attention import AttentionBatch
from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.kernels.kv_write import choose_kv_write
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.models.given_rows import GivenRows
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.on_transformers.attention import ATTRIBUTE, PagedLayer, PagedStep
from rayloom_engine.models.on_transformers.loader import WeightPlan
from rayloom_engine.models.on_transformers.measure import read_meta_model
from rayloom_engine.models.on_transformers.meta_model import MetaModel
from rayloom_engine.models.on_transformers.shard_cut import StageRanks, cut_to_shard
from rayloom_engine.models.on_transformers.shard_plan import read_shard_plan
from rayloom_engine.models.on_transformers.stage_cut import StageEnds, cut_to_stage
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup

_ONE_RANK = OneRank()


class _Hidden:
    """Stands for the output of a base model. Its hidden states are set; every other field is None."""

    def __init__(self, hidden_1ND: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden_1ND

    def __getattr__(self, _: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _GivenHidden(torch.nn.Module):
    """Stands for the modules below a head: returns hidden states that are computed already.

    With it, the model's own `forward` computes the logits, so all its scales and caps of logits are applied.
    """

    hidden_1ND: torch.Tensor | None = None

    @property
    def decoder(self) -> _GivenHidden:
        """This object itself: some models call only the decoder inside the base model, and not the base model."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Hidden:
        return _Hidden(self.hidden_1ND)


class TransformersModel:
    """Implements RankModel, for a rank's part of a model."""

    def __init__(
        self,
        shape: MeasuredShape,
        part: ModelPart,
        kernels: KernelSet,
        meta: MetaModel,
        ends: StageEnds,
        ranks: StageRanks,
    ) -> None:
        """`meta`: the rank's part of the model, with its weights loaded."""
        self.shape = shape
        self.part = part
        self.kernels = kernels
        sizes = shape.share(part.shard.count).layer_kv_sizes
        self.kv_layout = KvLayout(
            num_layers=len(part.stage.layers),
            num_kv_heads=max(num_kv_heads for num_kv_heads, _ in sizes),
            head_dim=shape.head_dim,
            layer_sizes=tuple(sizes[index] for index in part.stage.layers),
        )
        model = meta.model
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._step = PagedStep(kernels, choose_kv_write(kernels.target))
        for cache_index, index in enumerate(part.stage.layers):
            call = meta.calls[index]
            layer = PagedLayer(cache_index, call.page_dim, self._step)
            object.__setattr__(model.get_submodule(call.module), ATTRIBUTE, layer)
        self._base = getattr(model, model.base_model_prefix)
        self._given = _GivenHidden()
        setattr(model, model.base_model_prefix, self._given)
        self._head = model
        self._ends = ends
        self._ranks = ranks

    @property
    def hidden_dtype(self) -> torch.dtype:
        return self.kernels.target.compute_dtype

    def warm_up(self, cache: KvPages) -> None:
        """Does nothing: the first step compiles the kernels of attention (attention.py)."""

    @torch.no_grad()
    def forward(
        self,
        inputs: torch.Tensor,
        positions_T: torch.Tensor,
        batch: AttentionBatch,
        cache: KvPages,
        group: TensorGroup[torch.Tensor] = _ONE_RANK,
        wanted_rows: Sequence[int] | None = None,
        given: GivenRows[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        assert given is None, "models/embeds_support.py refuses the setting for this backend"
        stage, ends = self.part.stage, self._ends
        options: dict[str, Any] = {
            "position_ids": positions_T[None],
            # No token is padding. Without a mask, transformers would check whether the positions are those of several
            # packed sequences.
            "attention_mask": torch.ones_like(positions_T)[None],
            "use_cache": False,
        }
        self._step.begin(batch, cache)
        self._ranks.group = group
        try:
            if stage.is_first:
                output = self._base(input_ids=inputs[None], **options)
            else:
                ends.received_1TD = inputs[None]
                # A base model may change its input before the layers, so it gets a copy.
                output = self._base(inputs_embeds=inputs[None].clone(), **options)
            hidden_1TD: torch.Tensor | None = output[0] if stage.is_last else ends.sent_1TD
        finally:
            self._step.end()
            self._ranks.group = _ONE_RANK
            ends.received_1TD = None
            ends.sent_1TD = None
        assert hidden_1TD is not None, "the hook of the stage's last layer has kept its output"
        return hidden_1TD[0]

    @torch.no_grad()
    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        self._given.hidden_1ND = hidden_ND[None]
        logits_NV: torch.Tensor = self._head(input_ids=None, inputs_embeds=hidden_ND[None], use_cache=False).logits[0]
        self._given.hidden_1ND = None
        shard = self.part.shard
        if shard.count > 1 and logits_NV.shape[1] == self.shape.vocab_size:  # the head was not cut
            rows = shard.part(self.shape.vocab_size)
            logits_NV = logits_NV[:, rows.start : rows.stop].contiguous()
        return logits_NV.float()


def load_transformers_model(
    folder: Path,
    shape: MeasuredShape,
    kernels: KernelSet,
    *,
    dtype: torch.dtype,
    part: ModelPart,
    progress: Progress,
) -> tuple[TransformersModel, int]:
    """Returns a rank's part of the model in a Hugging Face folder, ready to run, and the bytes read.

    `dtype`: as in `models.loader`. Raises ModelError if the files do not fit the model, before any weight is read.
    """
    target = kernels.target
    meta = read_meta_model(folder, target.compute_dtype)
    plan = read_shard_plan(meta) if part.shard.count > 1 else None
    ends = cut_to_stage(meta, part.stage)
    weights = WeightPlan(folder, meta.model)
    ranks = StageRanks()
    if plan is not None:
        weights.cut(plan.cuts, part.shard)
        cut_to_shard(meta.model, plan, part.shard, ranks)
    num_bytes_read = weights.load(dtype, target.device, progress)
    return TransformersModel(shape, part, kernels, meta, ends, ranks), num_bytes_read
