"""DecoderSpec: the matrices and vectors of a rank's part of a decoder, and the tensors that they come from. Pure.

The checkpoint's q, k and v become the rows of one fused matrix. Its gate and up become the rows of another matrix. The
loader copies all of them from the file straight to these rows. With tensor parallelism, o and down are cut by columns,
and q, k, v, gate, up, embedding and head by rows. A rank's rows of q, k, v, gate and up produce exactly the inputs of
its columns of o and down. The sinks of attention are cut with the query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayloom_engine.layers.linear_spec import AxisPart, LinearSpec, TensorPart
from rayloom_engine.models.experts import ExpertNames, Experts
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.traits import NormPlacement
from rayloom_engine.parallel.model_part import ModelPart, whole_part

_EMBEDDING = "model.embed_tokens"

# Names of the norms before and after attention, before and after the MLP.
_NORMS: Mapping[NormPlacement, tuple[str | None, ...]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}

# Names of an expert's gate, up and down.
_EXPERT_MATRICES: Mapping[ExpertNames, tuple[str, str, str]] = {
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "block_sparse_moe": ("w1", "w3", "w2"),
}


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A vector of `size` elements. `name`: its tensor in the checkpoint.

    `part`: the slice of the tensor that the rank holds; () means all of it.
    """

    name: str
    size: int
    part: TensorPart = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """The matrices of a gated MLP."""

    gate_up: LinearSpec  # rows of gate, then up
    down: LinearSpec

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.gate_up, self.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture-of-experts MLP. Each rank has the whole router, and some rows and columns of every expert."""

    router: LinearSpec  # first a row for each selectable expert, then a row for the shared expert's gate
    experts: tuple[MlpSpec, ...]  # the shared expert last
    routing: Experts

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.router, *(linear for expert in self.experts for linear in expert.linears))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The matrices and vectors of one layer. All sizes are those of the rank's part."""

    attention_norm: VectorSpec | None  # the four norms are those of inputs and outputs; None: no norm
    attention_output_norm: VectorSpec | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None  # number of positions that a token sees, including itself; None: all
    qkv: LinearSpec  # rows of q, then k, then v
    q_norm: VectorSpec | None  # q_norm and k_norm are both set, or both None
    k_norm: VectorSpec | None
    sinks: VectorSpec | None  # a number for each query head; None: no head has a sink
    out: LinearSpec
    mlp_norm: VectorSpec | None
    mlp_output_norm: VectorSpec | None
    mlp: MlpSpec | ExpertsSpec

    @property
    def dense_mlp(self) -> MlpSpec:
        """The MLP of a layer without experts."""
        assert isinstance(self.mlp, MlpSpec), "the layer has experts"
        return self.mlp

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.qkv, self.out, *self.mlp.linears)

    @property
    def vectors(self) -> tuple[VectorSpec, ...]:
        found = (
            self.attention_norm,
            self.attention_output_norm,
            self.q_norm,
            self.k_norm,
            self.sinks,
            self.mlp_norm,
            self.mlp_output_norm,
        )
        return tuple(vector for vector in found if vector is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """The weights of one stage, or of a shard of it. A part that the stage does not have is None.

    `is_tied`: the head multiplies by `embedding`. If the embedding is in another stage, `head` is a copy of it instead.
    """

    embedding: LinearSpec | None
    layers: tuple[LayerSpec, ...]
    final_norm: VectorSpec | None
    head: LinearSpec | None
    is_tied: bool


def decoder_spec(shape: ModelShape, part: ModelPart, cut_unit: int = 1) -> DecoderSpec:
    """Returns the weights of a rank. In the names of tensors, layers have their number in the whole model.

    `cut_unit`: tensor parallelism cuts the feed-forward part at multiples of this number.
    """
    builder = _SpecBuilder(shape, part, cut_unit)
    stage = part.stage
    is_tied = shape.tie_word_embeddings and stage.is_first and stage.is_last
    return DecoderSpec(
        embedding=builder.embedding() if stage.is_first else None,
        layers=tuple(builder.layer(index) for index in stage.layers),
        final_norm=VectorSpec("model.norm.weight", shape.hidden_size) if stage.is_last else None,
        head=builder.head() if stage.is_last and not is_tied else None,
        is_tied=is_tied,
    )


def checkpoint_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns name -> sizes of every tensor that a checkpoint of dense weights must have."""
    spec = decoder_spec(shape, whole_part(shape.num_layers))
    sizes: dict[str, tuple[int, ...]] = {}
    sizes.update(_linear_sizes(spec.embedding))
    for layer in spec.layers:
        sizes.update((vector.name, (vector.size,)) for vector in layer.vectors)
        for linear in layer.linears:
            sizes.update(_linear_sizes(linear))
    if spec.final_norm is not None:
        sizes[spec.final_norm.name] = (spec.final_norm.size,)
    sizes.update(_linear_sizes(spec.head))
    return sizes


def _linear_sizes(spec: LinearSpec | None) -> dict[str, tuple[int, ...]]:
    if spec is None:
        return {}
    sizes: dict[str, tuple[int, ...]] = {}
    for name, rows in spec.outputs.items():
        sizes[f"{name}.weight"] = (rows.size, spec.inputs.size)
        if spec.has_bias:
            sizes[f"{name}.bias"] = (rows.size,)
    return sizes


@dataclass(frozen=True, slots=True)
class _SpecBuilder:
    shape: ModelShape
    part: ModelPart
    cut_unit: int

    def embedding(self) -> LinearSpec:
        return self._of_vocabulary(_EMBEDDING)

    def head(self) -> LinearSpec:
        return self._of_vocabulary(_EMBEDDING if self.shape.tie_word_embeddings else "lm_head")

    def layer(self, index: int) -> LayerSpec:
        shape = self.shape
        shard = self.part.shard
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        heads = shard.part(shape.num_heads)
        kv_heads = shard.kv_heads(shape.num_kv_heads)
        query = self._head_rows(heads, shape.num_heads)
        key_value = self._head_rows(kv_heads, shape.num_kv_heads)
        experts = shape.experts_of(index)
        before_attention, after_attention, before_mlp, after_mlp = (
            None if name is None else VectorSpec(f"{prefix}.{name}.weight", shape.hidden_size)
            for name in _NORMS[shape.traits.norm_placement]
        )
        q_norm_size, k_norm_size = shape.qk_norm_sizes
        return LayerSpec(
            attention_norm=before_attention,
            attention_output_norm=after_attention,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            head_dim=shape.head_dim,
            window=shape.layer_windows[index],
            qkv=LinearSpec(
                outputs=_stacked(
                    attention,
                    {"q_proj": query, "k_proj": key_value, "v_proj": key_value},
                    "qkv_proj" if shape.traits.is_fused else None,
                ),
                inputs=_whole(shape.hidden_size),
                has_bias=shape.qkv_bias,
                can_mix_forms=True,
            ),
            q_norm=VectorSpec(f"{attention}.q_norm.weight", q_norm_size) if shape.qk_norm else None,
            k_norm=VectorSpec(f"{attention}.k_norm.weight", k_norm_size) if shape.qk_norm else None,
            sinks=self._sinks(f"{attention}.sinks", heads) if shape.traits.has_sinks else None,
            out=self._by_columns(f"{attention}.o_proj", query, shape.o_bias),
            mlp_norm=before_mlp,
            mlp_output_norm=after_mlp,
            mlp=self._dense_mlp(f"{prefix}.mlp") if experts is None else self._experts(prefix, experts),
        )

    def _dense_mlp(self, prefix: str) -> MlpSpec:
        shape = self.shape
        feed_forward = self._feed_forward(shape.intermediate_size)
        return MlpSpec(
            gate_up=LinearSpec(
                outputs=_stacked(
                    prefix,
                    {"gate_proj": feed_forward, "up_proj": feed_forward},
                    "gate_up_proj" if shape.traits.is_fused else None,
                ),
                inputs=_whole(shape.hidden_size),
                has_bias=shape.mlp_bias,
            ),
            down=self._by_columns(f"{prefix}.down_proj", feed_forward, shape.mlp_bias),
        )

    def _experts(self, layer: str, experts: Experts) -> ExpertsSpec:
        prefix = f"{layer}.{experts.names}"
        names = [f"{prefix}.experts.{index}" for index in range(experts.num_experts)]
        routed = self._feed_forward(experts.moe_intermediate_size)
        specs = [self._expert(name, routed, experts) for name in names]
        router = {f"{prefix}.{experts.router}": _whole(experts.num_experts)}
        if experts.num_shared:
            shared = self._feed_forward(experts.shared_intermediate_size)
            specs.append(self._expert(f"{prefix}.shared_expert", shared, experts))
            router[f"{prefix}.shared_expert_gate"] = _whole(1)
        return ExpertsSpec(
            router=LinearSpec(outputs=router, inputs=_whole(self.shape.hidden_size), has_bias=experts.have_biases),
            experts=tuple(specs),
            routing=experts,
        )

    def _expert(self, name: str, feed_forward: AxisPart, experts: Experts) -> MlpSpec:
        gate, up, down = _EXPERT_MATRICES[experts.names]
        return MlpSpec(
            gate_up=LinearSpec(
                outputs=_stacked(name, {gate: feed_forward, up: feed_forward}, None),
                inputs=_whole(self.shape.hidden_size),
                has_bias=experts.have_biases,
            ),
            down=self._by_columns(f"{name}.{down}", feed_forward, experts.have_biases),
        )

    def _feed_forward(self, size: int) -> AxisPart:
        return AxisPart(self.part.shard.part(size, self.cut_unit), size)

    def _by_columns(self, name: str, columns: AxisPart, has_bias: bool) -> LinearSpec:
        """Returns the matrix `name` with only this shard's `columns`.

        The shards' results are summed, so only the first shard adds the bias.
        """
        return LinearSpec(
            outputs={name: _whole(self.shape.hidden_size)},
            inputs=columns,
            has_bias=has_bias and self.part.shard.is_first,
        )

    def _of_vocabulary(self, name: str) -> LinearSpec:
        """Returns the shard's rows of an embedding or head."""
        rows = AxisPart(self.part.shard.part(self.shape.vocab_size), self.shape.vocab_size)
        return LinearSpec(outputs={name: rows}, inputs=_whole(self.shape.hidden_size))

    def _sinks(self, name: str, heads: range) -> VectorSpec:
        """Returns the sinks of these query heads."""
        is_whole = len(heads) == self.shape.num_heads
        return VectorSpec(name, len(heads), () if is_whole else (slice(heads.start, heads.stop),))

    def _head_rows(self, heads: range, num_heads: int) -> AxisPart:
        """The rows of these attention heads."""
        head_dim = self.shape.head_dim
        return AxisPart(range(heads.start * head_dim, heads.stop * head_dim), num_heads * head_dim)


def _stacked(prefix: str, parts: Mapping[str, AxisPart], fused: str | None) -> dict[str, AxisPart]:
    """Returns the rows of the matrices `parts`, or of the one matrix in which the checkpoint has stacked them."""
    if fused is None:
        return {f"{prefix}.{name}": part for name, part in parts.items()}
    ranges = []
    start = 0
    for part in parts.values():
        ranges.append(range(start + part.indices.start, start + part.indices.stop))
        start += part.size
    return {f"{prefix}.{fused}": AxisPart(ranges[0], start, tuple(ranges[1:]))}


def _whole(size: int) -> AxisPart:
    return AxisPart(range(size), size)
