"""ModelShape: everything that config.json decides about a model. It is read before any weight and without torch.

`inspect`, the loader and the decoder all start from it, so unsupported models are refused here and nowhere else.
`models.costs` computes from it how much memory a model takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rayloom_engine.errors import ModelError, shown, word
from rayloom_engine.models.checkpoint.config_json import ConfigJson, read_json, refuses_broken
from rayloom_engine.models.checkpoint.limits import (
    MAX_EOS_IDS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_NORM_EPS,
    MAX_PARAMETERS,
    MAX_ROPE_FACTOR,
    MAX_ROPE_THETA,
    MAX_SIZE,
    MAX_VOCAB,
)

if TYPE_CHECKING:
    from rayloom_engine.models.quantised.scheme import CheckpointScheme

RopeKind = Literal["default", "llama3", "linear"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "llama3", "linear")
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("bfloat16", "float16", "float32")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_MODEL_TYPE_TO_ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """Rotary embedding. `factor` applies to "linear" and "llama3", the three fields after it only to "llama3"."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # context length in training, before it was stretched


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and options of a decoder-only model."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
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
    scheme: CheckpointScheme | None = None  # how the checkpoint's weights are quantised; None: they are dense

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one; None if no layer has one."""
        return next((window for window in self.layer_windows if window is not None), None)

    @property
    def attention_span(self) -> int | None:
        """Positions that a token sees in the layer with the widest window; None if some layer sees all positions."""
        windows = [window for window in self.layer_windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.layer_windows) else None

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_layer_parameters(self) -> int:
        qkv_size = self.query_size + 2 * self.kv_size
        return (
            self.hidden_size * qkv_size
            + self.hidden_size * self.query_size  # o
            + self.hidden_size * self.intermediate_size * 3  # gate, up, down
            + self.hidden_size * 2  # the two norms
            + qkv_size * self.qkv_bias
            + self.hidden_size * self.o_bias
            + (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
            + 2 * self.head_dim * self.qk_norm
        )

    @property
    def num_parameters(self) -> int:
        num_embeddings = 1 if self.tie_word_embeddings else 2
        embeddings = num_embeddings * self.vocab_size * self.hidden_size
        return self.num_layer_parameters * self.num_layers + embeddings + self.hidden_size

    @property
    def head_layers(self) -> float:
        """The work of the head, in layers, estimated by weights.

        Counts only half: in a prompt, only the last token needs the head.
        """
        return 0.5 * self.vocab_size * self.hidden_size / self.num_layer_parameters

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

    Raises ModelError if the folder has no usable config.json, or the model needs something that the engine does not
    support; the message names it and lists what works. Every size in the result is within `checkpoint.limits`.
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
    architecture = _architecture(config)
    if (activation := config.text("hidden_act", default="silu")) != "silu":
        raise ModelError(f"{config.path}: hidden_act {shown(activation)} is not supported; works: silu", "Unsupported")

    # Check the sizes before using them: a shape stores one window per layer.
    num_layers = config.count("num_hidden_layers", at_most=MAX_LAYERS)
    vocab_size = config.count("vocab_size", at_most=MAX_VOCAB)
    hidden_size = config.count("hidden_size", at_most=MAX_SIZE)
    num_heads, num_kv_heads, head_dim = _heads(config, architecture, hidden_size)
    max_position_embeddings = config.count("max_position_embeddings", default=2048)
    intermediate_size = config.count("intermediate_size", at_most=MAX_SIZE)
    has_attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and config.flag("attention_bias")

    return ModelShape(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6, at_most=MAX_NORM_EPS),
        rope=_rope(config, max_position_embeddings),
        layer_windows=_layer_windows(config, architecture, num_layers),
        qkv_bias=has_attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=has_attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and config.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        checkpoint_dtype=_checkpoint_dtype(config),
        eos_token_ids=_eos_token_ids(folder, config, vocab_size),
        scheme=_scheme(config, hidden_size, intermediate_size, (num_heads * head_dim, num_kv_heads * head_dim)),
    )


def _scheme(
    config: ConfigJson, hidden_size: int, intermediate_size: int, head_sizes: tuple[int, int]
) -> CheckpointScheme | None:
    """Returns how the checkpoint is quantised; None for dense weights.

    `head_sizes`: those of all query heads and of all key/value heads.
    """
    if not config.mapping("quantization_config"):
        return None
    # Imported here because it loads numpy, which dense checkpoints do not need at the start.
    from rayloom_engine.models.quantised.read_scheme import read_scheme

    query_size, kv_size = head_sizes
    inputs = {"hidden_size": hidden_size, "the query heads' size": query_size, "intermediate_size": intermediate_size}
    return read_scheme(config, inputs, {**inputs, "the key/value heads' size": kv_size})


def _heads(config: ConfigJson, architecture: str, hidden_size: int) -> tuple[int, int, int]:
    """Returns the numbers of query heads and of key/value heads, and the size of a head."""
    num_heads = config.count("num_attention_heads", at_most=MAX_HEADS)
    num_kv_heads = config.count("num_key_value_heads", default=num_heads, at_most=MAX_HEADS)
    if num_heads % num_kv_heads != 0:
        raise ModelError(
            f"{config.path}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
    if default_head_dim == 0 and config.get("head_dim") is None:
        raise ModelError(
            f"{config.path}: hidden_size {hidden_size} is less than num_attention_heads {num_heads}; "
            "a head would have no size"
        )
    head_dim = config.count("head_dim", default=default_head_dim, at_most=MAX_SIZE)
    if head_dim % 2 != 0:
        raise ModelError(f"{config.path}: head_dim {head_dim} is odd; rotary embedding needs an even one")
    return num_heads, num_kv_heads, head_dim


def _architecture(config: ConfigJson) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named:
        architecture = word(named[0])
    else:
        model_type = word(config.get("model_type"))
        architecture = _MODEL_TYPE_TO_ARCHITECTURE.get(model_type, f"model_type {model_type}")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{config.path}: architecture {architecture} is not supported; works: {', '.join(ARCHITECTURES)}",
            "Unsupported",
        )
    return architecture


def _rope(config: ConfigJson, max_position_embeddings: int) -> RopeParameters:
    """Reads transformers 5's rope_parameters {rope_theta, rope_type, ...}, or transformers 4's rope_theta and
    rope_scaling.
    """
    scaling = config.mapping("rope_parameters") or config.mapping("rope_scaling")
    given_values = {field: value for field, value in scaling.items() if value is not None}
    rope = ConfigJson(path=config.path, values={"rope_theta": config.get("rope_theta"), **given_values})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    known = next((name for name in ROPE_KINDS if name == kind), None)
    if known is None or any(isinstance(value, dict) for value in scaling.values()):
        given = kind if known is None else "one per layer type"
        raise ModelError(
            f"{config.path}: rope type {shown(given)} is not supported; works: {', '.join(ROPE_KINDS)}", "Unsupported"
        )
    for holder in (config, rope):
        if holder.number("partial_rotary_factor", default=1.0, at_most=1.0) != 1.0:
            raise ModelError(
                f"{config.path}: partial_rotary_factor is not supported; works: rotation of whole heads", "Unsupported"
            )
    theta = rope.number("rope_theta", default=10000.0, at_most=MAX_ROPE_THETA)
    if known == "default":
        return RopeParameters(theta=theta)
    factor = rope.number("factor", at_most=MAX_ROPE_FACTOR)
    if known == "linear":
        return RopeParameters(theta=theta, kind=known, factor=factor)
    low = rope.number("low_freq_factor", at_most=MAX_ROPE_FACTOR)
    high = rope.number("high_freq_factor", at_most=MAX_ROPE_FACTOR)
    if not low < high:
        raise ModelError(f"{config.path}: low_freq_factor {low:g} must be less than high_freq_factor {high:g}")
    return RopeParameters(
        theta=theta,
        kind=known,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=rope.count("original_max_position_embeddings", default=max_position_embeddings),
    )


def _layer_windows(config: ConfigJson, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    # If sliding_window is absent, transformers' default of 4096 applies; null means no window.
    window = config.count("sliding_window", default=4096) if config.get("sliding_window", 4096) is not None else None
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if window is None or not config.flag("use_sliding_window"):
        return (None,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.count("max_window_layers", default=28, at_least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    allowed = ("full_attention", "sliding_attention")
    is_named = isinstance(layer_types, list) and all(kind in allowed for kind in layer_types)
    if not is_named or len(layer_types) != num_layers:
        raise ModelError(f"{config.path}: layer_types must name {num_layers} layers, each one of {', '.join(allowed)}")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _checkpoint_dtype(config: ConfigJson) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    known = dtype.removeprefix("torch.") if isinstance(dtype, str) else None
    if known not in DTYPES:
        raise ModelError(
            f"{config.path}: dtype {shown(dtype)} is not supported; works: {', '.join(DTYPES)}", "Unsupported"
        )
    return known


def _eos_token_ids(folder: Path, config: ConfigJson, vocab_size: int) -> tuple[int, ...]:
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
            # Some fine-tunes list an id beyond their embedding, or use -1 or null for none. The model never generates
            # these.
            return tuple(token_id for token_id in ids if token_id is not None and 0 <= token_id < vocab_size)
    return ()


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
