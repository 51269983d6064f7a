"""ModelShape: everything that config.json decides about a model. It is read before any weight and without torch.

`inspect`, the loader and the decoder all use the shape, so unsupported models are refused here and nowhere else.
`models.costs` computes from the shape how much memory a model takes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rayloom_engine.errors import ModelError, shown
from rayloom_engine.models.checkpoint.config_json import ConfigJson, read_json, refuses_broken
from rayloom_engine.models.checkpoint.limits import (
    MAX_EOS_IDS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_NORM_EPS,
    MAX_PARAMETERS,
    MAX_SIZE,
    MAX_VOCAB,
)
from rayloom_engine.models.experts import ROUTERS, Experts, read_experts
from rayloom_engine.models.families import (
    FAMILIES,
    DecoderFamily,
    architecture_of,
    layer_windows,
    read_rope_of,
    read_traits,
)
from rayloom_engine.models.rope.parameters import RopeParameters, longest_context
from rayloom_engine.models.traits import LLAMA, Traits

if TYPE_CHECKING:
    from rayloom_engine.models.quantised.scheme import CheckpointScheme

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ExpertSizes(NamedTuple):
    """The experts of a mixture-of-experts model. In each layer, a router selects some of them for each token."""

    num_experts: int  # of a layer
    num_experts_per_token: int
    moe_intermediate_size: int  # width of an expert


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and options of a decoder-only model. `traits`: the differences from Llama."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int  # longest context in tokens, with the rotary embedding's scaling
    rms_norm_eps: float
    rope: RopeParameters
    layer_windows: tuple[int | None, ...]  # per layer: positions that a token sees, including itself; None: all
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    checkpoint_dtype: str  # one of DTYPES
    eos_token_ids: tuple[int, ...]
    traits: Traits = LLAMA
    experts: Experts | None = None  # of a mixture-of-experts model
    scheme: CheckpointScheme | None = None  # how the checkpoint's weights are quantised; None: they are dense

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers with a window; None if no layer has a window."""
        return next((window for window in self.layer_windows if window is not None), None)

    @property
    def attention_span(self) -> int | None:
        """Positions that a token sees in the layer with the widest window; None if some layer sees all positions."""
        windows = [window for window in self.layer_windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.layer_windows) else None

    def for_context(self, context_len: int) -> ModelShape:
        """Returns the shape for an engine whose sequences have up to `context_len` tokens."""
        return dataclasses.replace(self, rope=self.rope.for_context(context_len))

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Sizes of the norms of queries and of keys; 0 if there are no such norms."""
        if not self.qk_norm:
            return 0, 0
        return (self.query_size, self.kv_size) if self.traits.has_wide_qk_norm else (self.head_dim, self.head_dim)

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return self.head_dim**-0.5 if self.traits.score_scale is None else self.traits.score_scale

    def rope_of(self, window: int | None) -> RopeParameters:
        """Returns the rotary embedding of the layers with this window."""
        return self.rope if window is None or self.traits.window_rope is None else self.traits.window_rope

    def experts_of(self, layer: int) -> Experts | None:
        """Returns the experts of a layer; None for a layer with one MLP for all tokens."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def named_feed_forward_sizes(self) -> dict[str, int]:
        """The intermediate sizes of the model's MLPs, by field of config.json."""
        sizes = {"intermediate_size": self.intermediate_size} if self.num_dense_layers else {}
        return sizes if self.experts is None else {**sizes, **self.experts.named_sizes}

    @property
    def num_dense_layers(self) -> int:
        """Layers with one MLP for all tokens."""
        return self.num_layers if self.experts is None else len(self.experts.dense_layers)

    @property
    def _sum_of_layers(self) -> int:
        """Weights of all layers."""
        size = self.intermediate_size
        dense = self.hidden_size * size * 3 + (2 * size + self.hidden_size) * self.mlp_bias  # gate, up, down
        found = self.num_layers * self._attention_parameters + self.num_dense_layers * dense
        if self.experts is not None:
            found += (self.num_layers - self.num_dense_layers) * self.experts.layer_parameters(self.hidden_size)
        return found

    @property
    def _attention_parameters(self) -> int:
        """Weights of a layer without its MLP."""
        qkv_size = self.query_size + 2 * self.kv_size
        return (
            self.hidden_size * qkv_size
            + self.hidden_size * self.query_size  # o
            + self.hidden_size * self.traits.num_norms
            + qkv_size * self.qkv_bias
            + self.hidden_size * self.o_bias
            + sum(self.qk_norm_sizes)
            + self.num_heads * self.traits.has_sinks
        )

    @property
    def num_layer_parameters(self) -> int:
        """Weights of an average layer."""
        return self._sum_of_layers // self.num_layers

    @property
    def num_parameters(self) -> int:
        num_embeddings = 1 if self.tie_word_embeddings else 2
        embeddings = num_embeddings * self.vocab_size * self.hidden_size
        return self._sum_of_layers + embeddings + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """All weights except those of the experts that are not selected for a token."""
        if self.experts is None:
            return self.num_parameters
        num_layers = self.num_layers - self.num_dense_layers
        return self.num_parameters - num_layers * self.experts.inactive_parameters(self.hidden_size)

    @property
    def expert_sizes(self) -> ExpertSizes | None:
        """The experts that a router selects from; None if each layer has one MLP for all tokens."""
        experts = self.experts
        if experts is None:
            return None
        return ExpertSizes(experts.num_experts, experts.num_experts_per_token, experts.moe_intermediate_size)

    @property
    def head_layers(self) -> float:
        """The number of layers that do as much work as the head, estimated from the numbers of weights.

        Only half of the head's weights count, because only the last token of a prompt needs the head.
        """
        num_inactive = self.num_parameters - self.num_active_parameters
        layer_parameters = self.num_layer_parameters - num_inactive / self.num_layers
        return 0.5 * self.vocab_size * self.hidden_size / layer_parameters

    def weight_bytes(self, element_bytes: int) -> int:
        """Returns the bytes of all weights, at `element_bytes` each."""
        return self.num_parameters * element_bytes

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Returns the bytes that one token takes in the KV cache, in all layers together."""
        return (
            2  # key and value
            * self.num_layers
            * self.kv_size
            * element_bytes
        )


def read_shape(folder: Path) -> ModelShape:
    """Returns the shape of the model in a Hugging Face folder. Reads only config.json and generation_config.json.

    Raises ModelError if the folder has no usable config.json, or if the engine does not support a value in it. The
    message names the value and lists the supported ones. Every size in the result is within `checkpoint.limits`.
    """
    with refuses_broken(folder / "config.json"):
        shape = _shape(folder, ConfigJson(path=folder / "config.json", values=read_json(folder / "config.json")))
    if shape.num_parameters > MAX_PARAMETERS:
        raise ModelError(
            f"{folder / 'config.json'}: it has {shape.num_parameters} parameters; works: up to {MAX_PARAMETERS}",
            "Unsupported",
        )
    return shape


def _shape(folder: Path, config: ConfigJson) -> ModelShape:
    architecture = architecture_of(config)
    family = FAMILIES[architecture]

    # Check the sizes before using them, because a shape stores one window for each layer.
    num_layers = config.count("num_hidden_layers", at_most=MAX_LAYERS)
    vocab_size = config.count("vocab_size", at_most=MAX_VOCAB)
    hidden_size = config.count("hidden_size", at_most=MAX_SIZE)
    num_heads, num_kv_heads, head_dim = _heads(config, family, hidden_size)
    max_position_embeddings = config.count("max_position_embeddings", default=2048)
    rope = read_rope_of(config, family, head_dim, max_position_embeddings)
    traits = read_traits(config, family, hidden_size, head_dim, max_position_embeddings)
    intermediate_size = config.count("intermediate_size", at_most=MAX_SIZE)
    experts = None if family.experts is None else read_experts(config, family.experts, num_layers)
    has_attention_bias = family.attention_bias
    if family.reads_attention_bias and config.get("attention_bias") is not None:
        has_attention_bias = config.flag("attention_bias")

    shape = ModelShape(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=longest_context(rope, max_position_embeddings),
        rms_norm_eps=config.number("rms_norm_eps", default=family.eps, at_most=MAX_NORM_EPS),
        rope=rope,
        layer_windows=layer_windows(config, family, num_layers),
        qkv_bias=has_attention_bias or family.has_qkv_bias,
        o_bias=has_attention_bias,
        mlp_bias=family.reads_mlp_bias and config.flag("mlp_bias"),
        qk_norm=family.has_qk_norm,
        tie_word_embeddings=family.is_tied
        if config.get("tie_word_embeddings") is None
        else config.flag("tie_word_embeddings"),
        checkpoint_dtype=checkpoint_dtype(config, family.dtype),
        eos_token_ids=eos_token_ids(folder, config, vocab_size),
        traits=traits,
        experts=experts,
    )
    return dataclasses.replace(shape, scheme=_scheme(config, shape))


def _scheme(config: ConfigJson, shape: ModelShape) -> CheckpointScheme | None:
    """Returns how the checkpoint of a shape is quantised; None for dense weights."""
    if not config.mapping("quantization_config"):
        return None
    # Imported here because it loads numpy, which dense checkpoints do not need at the start.
    from rayloom_engine.models.quantised.read_scheme import read_scheme

    inputs = {
        "hidden_size": shape.hidden_size,
        "the query heads' size": shape.query_size,
        **shape.named_feed_forward_sizes,
    }
    scheme = read_scheme(config, inputs, {**inputs, "the key/value heads' size": shape.kv_size})
    _check_stacked(config, shape, scheme)
    # Quantisers keep routers dense, but few of them write that into config.json.
    return scheme if shape.experts is None else dataclasses.replace(scheme, skipped=(*scheme.skipped, *ROUTERS))


def _check_stacked(config: ConfigJson, shape: ModelShape, scheme: CheckpointScheme) -> None:
    """Raises ModelError if a checkpoint that stacks its experts is not mxfp4, or if any other checkpoint is."""
    are_stacked = shape.experts is not None and shape.experts.are_stacked
    if are_stacked != (scheme.label == "mxfp4"):
        raise ModelError(
            f"{config.path}: {shape.architecture} with weights quantised as {scheme.label} is not supported; works: "
            + ("mxfp4, or dense weights" if are_stacked else "mxfp4 with GptOssForCausalLM"),
            "Unsupported",
        )


def _heads(config: ConfigJson, family: DecoderFamily, hidden_size: int) -> tuple[int, int, int]:
    """Returns the numbers of query heads and of key/value heads, and the size of a head."""
    num_heads = config.count("num_attention_heads", at_most=MAX_HEADS)
    num_kv_heads = config.count("num_key_value_heads", default=num_heads, at_most=MAX_HEADS)
    if num_heads % num_kv_heads != 0:
        raise ModelError(
            f"{config.path}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    default_head_dim = family.head_dim or hidden_size // num_heads
    if default_head_dim == 0 and config.get("head_dim") is None:
        raise ModelError(
            f"{config.path}: hidden_size {hidden_size} is less than num_attention_heads {num_heads}; "
            "a head would have no size"
        )
    head_dim = config.count("head_dim", default=default_head_dim, at_most=MAX_SIZE)
    if head_dim % 2 != 0:
        raise ModelError(f"{config.path}: head_dim {head_dim} is odd; rotary embedding needs an even one")
    return num_heads, num_kv_heads, head_dim


def checkpoint_dtype(config: ConfigJson, default: str = "float32") -> str:
    """Returns the type of a checkpoint's weights, one of DTYPES. Raises ModelError for any other type."""
    dtype = config.get("dtype") or config.get("torch_dtype") or default
    known = dtype.removeprefix("torch.") if isinstance(dtype, str) else None
    if known not in DTYPES:
        raise ModelError(
            f"{config.path}: dtype {shown(dtype)} is not supported; works: {', '.join(DTYPES)}", "Unsupported"
        )
    return known


def eos_token_ids(folder: Path, config: ConfigJson, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end a text, from generation_config.json or else config.json."""
    path = folder / "generation_config.json"
    generation = ConfigJson(path=path, values=read_json(path) if path.exists() else {})
    for holder in (generation, config):
        if (given := holder.get("eos_token_id")) is not None:
            ids = given if isinstance(given, list) else [given]
            if not all(token_id is None or _is_token_id(token_id) for token_id in ids):
                raise ModelError(
                    f"{holder.path}: eos_token_id must be a token id or a list of them, given {shown(given)}"
                )
            if len(ids) > MAX_EOS_IDS:
                raise ModelError(f"{holder.path}: eos_token_id lists {len(ids)} ids; works: up to {MAX_EOS_IDS}")
            # Some fine-tunes list an id beyond their embedding, or write -1 or null for no id. The model never
            # generates such ids.
            return tuple(token_id for token_id in ids if token_id is not None and 0 <= token_id < vocab_size)
    return ()


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
