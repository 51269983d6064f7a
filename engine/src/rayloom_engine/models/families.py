"""The architectures that the engine computes natively, with a table of how their config.json is read. Pure.

A family needs no code of its own: `DecoderFamily` says how its configuration is read, `Traits` how its decoder is
composed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayloom_engine.errors import ModelError, shown, word
from rayloom_engine.models.checkpoint.config_json import ConfigJson
from rayloom_engine.models.experts import ExpertFields
from rayloom_engine.models.rope.parameters import RopeParameters, check_former, read_one_rope, read_rope
from rayloom_engine.models.traits import LLAMA, Traits

# The layers that have a window. all-if-set: all layers, if use_sliding_window is set. types: the layers that the field
# layer_types names. all-or-types: as `types`, but all layers without layer_types. last-if-set, first-if-set: as
# `types`, if use_sliding_window is set. `_unnamed_layers` has the rules without layer_types.
WindowRule = Literal["none", "all", "all-if-set", "all-or-types", "last-if-set", "first-if-set", "types"]

_MAX_SCALE = 1e6
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFamily:
    """Describes how an architecture's config.json is read. Defaults: those of transformers for an absent field."""

    model_type: str
    traits: Traits = LLAMA
    has_qkv_bias: bool = False
    reads_attention_bias: bool = False  # the field attention_bias decides whether q, k, v and o have biases
    attention_bias: bool = False  # default of attention_bias
    reads_mlp_bias: bool = False
    has_qk_norm: bool = False
    head_dim: int | None = None  # default of head_dim; None: hidden size / heads
    eps: float = 1e-6
    is_tied: bool = False
    dtype: str = "float32"  # type of the weights, if config.json names none
    activation_field: str = "hidden_act"
    activation: str = "silu"  # the only value of activation_field that works
    windows: WindowRule = "none"
    window: int | None = 4096  # default of sliding_window
    window_period: int = 1  # without layer_types, every window_period-th layer has no window
    has_multipliers: bool = False  # embedding_multiplier, residual_multiplier, attention_multiplier, logits_scaling
    has_caps: bool = False  # attn_logit_softcapping, final_logit_softcapping, query_pre_attn_scalar
    cap_defaults: tuple[float | None, float | None] = (None, None)
    theta: float = 10_000.0  # default of rope_theta
    rope: Mapping[str, Any] | None = None  # if config.json has neither rope_parameters nor rope_scaling
    local_theta: float | None = None  # default theta of layers with windows; None: all layers have the same theta
    experts: ExpertFields | None = None  # None: one MLP for all tokens
    has_gate_limit: bool = False  # swiglu_alpha, swiglu_limit


_GEMMA = DecoderFamily(
    model_type="gemma2",
    traits=Traits(activation="gelu_tanh", norm_placement="both", norm_offset=1.0),
    reads_attention_bias=True,
    head_dim=256,
    is_tied=True,
    activation_field="hidden_activation",
    activation="gelu_pytorch_tanh",
    windows="types",
    window_period=2,
    has_caps=True,
    cap_defaults=(50.0, 30.0),
)

FAMILIES: Mapping[str, DecoderFamily] = {
    "LlamaForCausalLM": DecoderFamily(model_type="llama", reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": DecoderFamily(model_type="mistral", windows="all-or-types"),
    "Qwen2ForCausalLM": DecoderFamily(model_type="qwen2", has_qkv_bias=True, windows="last-if-set"),
    "Qwen3ForCausalLM": DecoderFamily(
        model_type="qwen3", reads_attention_bias=True, has_qk_norm=True, head_dim=128, windows="last-if-set"
    ),
    "Phi3ForCausalLM": DecoderFamily(
        model_type="phi3", traits=Traits(is_fused=True), eps=1e-5, windows="all", window=None
    ),
    "Olmo2ForCausalLM": DecoderFamily(
        model_type="olmo2",
        traits=Traits(norm_placement="after", has_wide_qk_norm=True),
        reads_attention_bias=True,
        has_qk_norm=True,
        eps=1e-5,
    ),
    "GraniteForCausalLM": DecoderFamily(
        model_type="granite", reads_attention_bias=True, reads_mlp_bias=True, has_multipliers=True
    ),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": dataclasses.replace(
        _GEMMA,
        model_type="gemma3_text",
        has_qk_norm=True,
        window_period=6,
        cap_defaults=(None, None),
        local_theta=10_000.0,
    ),
    "MixtralForCausalLM": DecoderFamily(
        model_type="mixtral",
        eps=1e-5,
        windows="all",
        window=None,
        theta=1_000_000.0,
        experts=ExpertFields(
            num_experts=8,
            num_experts_per_token=2,
            size_field="intermediate_size",
            always_normalises=True,
            has_dense_layers=False,
            names="block_sparse_moe",
        ),
    ),
    "Qwen2MoeForCausalLM": DecoderFamily(
        model_type="qwen2_moe",
        has_qkv_bias=True,
        windows="first-if-set",
        experts=ExpertFields(num_experts=60, num_experts_per_token=4, size=1408, shared_size=5632),
    ),
    "Qwen3MoeForCausalLM": DecoderFamily(
        model_type="qwen3_moe",
        reads_attention_bias=True,
        has_qk_norm=True,
        windows="all-if-set",
        experts=ExpertFields(num_experts=128, num_experts_per_token=8, size=768),
    ),
    "OlmoeForCausalLM": DecoderFamily(
        model_type="olmoe",
        traits=Traits(has_wide_qk_norm=True),
        reads_attention_bias=True,
        has_qk_norm=True,
        eps=1e-5,
        experts=ExpertFields(
            num_experts=64, num_experts_per_token=8, size_field="intermediate_size", has_dense_layers=False
        ),
    ),
    "GptOssForCausalLM": DecoderFamily(
        model_type="gpt_oss",
        traits=Traits(activation="clamped_silu", has_sinks=True),
        reads_attention_bias=True,
        attention_bias=True,
        head_dim=64,
        eps=1e-5,
        dtype="bfloat16",  # OpenAI's config.json names none
        windows="types",
        window=128,
        window_period=2,
        theta=150_000.0,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        has_gate_limit=True,
        experts=ExpertFields(
            num_experts=128,
            num_experts_per_token=4,
            size_field="intermediate_size",
            always_normalises=True,  # a softmax over the selected experts alone is the same
            has_dense_layers=False,
            router="router",
            have_biases=True,
            are_stacked=True,
        ),
    ),
}
ARCHITECTURES = tuple(FAMILIES)


def has_native_decoder(config: ConfigJson) -> bool:
    """Returns whether our own decoder has the model's architecture."""
    return _named_architecture(config) in FAMILIES


def missing_in_decoder(config: ConfigJson) -> str:
    """Returns why the native decoder cannot compute a model of an architecture that it has; empty if it can.

    Also empty if the decoder does not have the architecture.
    """
    family = FAMILIES.get(_named_architecture(config))
    return "" if family is None else _missing_value(config, family)


def architecture_of(config: ConfigJson) -> str:
    """Returns the architecture, a key of FAMILIES. Raises ModelError if FAMILIES does not have it."""
    architecture = _named_architecture(config)
    if architecture not in FAMILIES:
        raise ModelError(
            f"{config.path}: architecture {architecture} is not supported; works: {', '.join(ARCHITECTURES)}; "
            "with model_backend auto or transformers, most other decoder-only models work",
            "Unsupported",
        )
    return architecture


def _named_architecture(config: ConfigJson) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named:
        return word(named[0])
    model_type = word(config.get("model_type"))
    known = (name for name, family in FAMILIES.items() if family.model_type == model_type)
    return next(known, f"model_type {model_type}")


def read_traits(
    config: ConfigJson, family: DecoderFamily, hidden_size: int, head_dim: int, max_positions: int
) -> Traits:
    """Returns the traits of a model. Raises ModelError for values that the family's decoder does not support."""
    _check_activation(config, family)
    if config.flag("use_bidirectional_attention"):
        raise ModelError(
            f"{config.path}: use_bidirectional_attention is not supported; works: false, as every token sees only "
            "earlier ones",
            "Unsupported",
        )
    if missing := _missing_value(config, family):
        raise ModelError(f"{config.path}: {missing}", "Unsupported")
    traits = family.traits
    if family.has_multipliers:

        def scale(field: str) -> float:
            return config.number(field, default=1.0, at_most=_MAX_SCALE)

        return dataclasses.replace(
            traits,
            embedding_scale=scale("embedding_multiplier"),
            residual_scale=scale("residual_multiplier"),
            score_scale=scale("attention_multiplier"),
            logit_scale=1.0 / scale("logits_scaling"),
        )
    if family.has_gate_limit:
        return dataclasses.replace(
            traits,
            gate_slope=config.number("swiglu_alpha", default=1.702, at_most=_MAX_SCALE),
            gate_limit=config.number("swiglu_limit", default=7.0, at_most=_MAX_SCALE),
        )
    if family.has_caps:
        score_cap, logit_cap = family.cap_defaults
        window_rope = None
        if family.local_theta is not None:
            window_rope = _rope_of(config, "sliding_attention", head_dim, max_positions, family.local_theta)
        return dataclasses.replace(
            traits,
            embedding_scale=float(hidden_size**0.5),
            has_scaled_embeds=True,
            score_scale=config.number("query_pre_attn_scalar", default=256.0, at_most=_MAX_SCALE) ** -0.5,
            score_cap=_cap(config, "attn_logit_softcapping", score_cap),
            logit_cap=_cap(config, "final_logit_softcapping", logit_cap),
            window_rope=window_rope,
        )
    return traits


def read_rope_of(config: ConfigJson, family: DecoderFamily, head_dim: int, max_positions: int) -> RopeParameters:
    """Returns the rotary embedding of layers without windows, usually that of all layers. Raises ModelError."""
    if family.local_theta is None:
        return read_rope(config, head_dim, max_positions, default=family.rope, default_theta=family.theta)
    return _rope_of(config, "full_attention", head_dim, max_positions, 1_000_000.0)


def layer_windows(config: ConfigJson, family: DecoderFamily, num_layers: int) -> tuple[int | None, ...]:
    """Returns the number of positions that a token sees in each layer; None: all. Raises ModelError."""
    full = (None,) * num_layers
    if family.windows == "none":
        return full
    # transformers writes a window of 0 or null if use_sliding_window is not set.
    if family.windows.endswith("-if-set") and not config.flag("use_sliding_window"):
        return full
    # null means no window.
    given = config.get("sliding_window", family.window)
    window = None if given is None else config.count("sliding_window", default=family.window)
    if family.windows in ("all", "all-if-set"):
        return (window,) * num_layers
    if window is None:
        return full
    layer_types = config.get("layer_types")
    if layer_types is None and family.windows == "all-or-types":
        return (window,) * num_layers
    if layer_types is None:
        return tuple(window if is_windowed else None for is_windowed in _unnamed_layers(config, family, num_layers))
    is_named = isinstance(layer_types, list) and all(kind in _LAYER_TYPES for kind in layer_types)
    if not is_named or len(layer_types) != num_layers:
        raise ModelError(
            f"{config.path}: layer_types must name {num_layers} layers, each one of {', '.join(_LAYER_TYPES)}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _unnamed_layers(config: ConfigJson, family: DecoderFamily, num_layers: int) -> list[bool]:
    """Returns which layers have a window, for a config without layer_types."""
    if family.windows.endswith("-if-set"):
        border = config.count("max_window_layers", default=28, at_least=0)
        if family.windows == "first-if-set":  # every second layer below the border
            return [layer % 2 == 0 and layer < border for layer in range(num_layers)]
        return [layer >= border for layer in range(num_layers)]
    period = config.count("sliding_window_pattern", default=family.window_period)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _check_activation(config: ConfigJson, family: DecoderFamily) -> None:
    field, works = family.activation_field, family.activation
    given = config.text(field, default=works)
    if given != works:
        raise ModelError(f"{config.path}: {field} {shown(given)} is not supported; works: {works}", "Unsupported")


def _missing_value(config: ConfigJson, family: DecoderFamily) -> str:
    """Returns why the native decoder cannot compute a model with these values; empty if it can."""
    if family.local_theta is not None and config.get("attn_logit_softcapping") is not None:
        # Only Gemma 2 has this cap. transformers reads the field for Gemma 3 too, but caps no scores.
        given = shown(config.get("attn_logit_softcapping"))
        return f"attn_logit_softcapping {given} is not supported for Gemma 3; works: null"
    if family.experts is None:
        return ""
    if config.get("clip_qkv") is not None:
        return f"clip_qkv {shown(config.get('clip_qkv'))} is not supported; works: null"
    if family.has_qkv_bias and config.get("qkv_bias") is False:
        return "qkv_bias false is not supported; works: true"
    return ""


def _cap(config: ConfigJson, field: str, default: float | None) -> float | None:
    given = config.get(field, default)
    return None if given is None else config.number(field, default=default, at_most=_MAX_SCALE)


def _rope_of(config: ConfigJson, layer_type: str, head_dim: int, max_positions: int, theta: float) -> RopeParameters:
    """Returns the rotary embedding of one type of layers.

    transformers 5 writes an object for each type. transformers 4 writes rope_local_base_freq for layers with windows.
    The embedding of these layers is not scaled. For the other layers, transformers 4 writes rope_theta and
    rope_scaling.
    """

    def read(values: dict[str, Any]) -> RopeParameters:
        return read_one_rope(config, values, head_dim, max_positions, theta)

    of_type = ConfigJson(path=config.path, values=config.mapping("rope_parameters")).mapping(layer_type)
    if layer_type != "full_attention":
        given = {name: value for name, value in of_type.items() if value is not None}
        return read({"rope_theta": config.get("rope_local_base_freq") or theta, **given})
    found = read(of_type or config.mapping("rope_scaling"))
    if of_type:
        check_former(config, found, read({**of_type, **config.mapping("rope_scaling")}))
    return found
