"""Measures a model on the meta device: sizes of weights and KV cache, layer by layer. Reads no weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rayloom_engine.errors import ModelError, word
from rayloom_engine.models.checkpoint.config_json import ConfigJson, read_json
from rayloom_engine.models.checkpoint.limits import MAX_LAYERS, MAX_PARAMETERS, MAX_SIZE, MAX_VOCAB
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.on_transformers.config import read_config, unsupported
from rayloom_engine.models.on_transformers.meta_model import MetaModel, build_meta_model
from rayloom_engine.models.on_transformers.shares import measure_shares, weight_sizes, widest
from rayloom_engine.models.rope.parameters import RopeParameters
from rayloom_engine.models.shape import DTYPES, ExpertSizes, checkpoint_dtype, eos_token_ids

# Names that configurations give the number of experts of a token.
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def read_meta_model(folder: Path, dtype: torch.dtype) -> MetaModel:
    """Returns the model in a Hugging Face folder, on the meta device. Raises ModelError if it cannot be served."""
    path = folder / "config.json"
    config, model_class = read_config(folder)
    try:
        return build_meta_model(config, model_class, dtype)
    except ModelError as error:
        raise unsupported(path, f"{model_class.__name__} cannot be served, because {error}") from error


def measured_shape(folder: Path, num_shards: int | None = None) -> MeasuredShape:
    """Returns the shape of the model in a Hugging Face folder. Raises ModelError if it cannot be served.

    `num_shards`: if this number of ranks can share a layer, shares are measured for this number alone. Otherwise, and
    with None, shares are measured for all numbers of ranks that can share a layer.
    """
    path = folder / "config.json"
    given = ConfigJson(path=path, values=read_json(path))
    _refuse_quantised(given)
    # Check the sizes before modules of these sizes are made.
    config, _ = read_config(folder)
    names = ("num_hidden_layers", "hidden_size", "vocab_size")  # attributes; their names in JSON may differ
    known = ConfigJson(path=path, values={name: getattr(config, name, None) for name in names})
    known.count("num_hidden_layers", at_most=MAX_LAYERS)
    known.count("hidden_size", at_most=MAX_SIZE)
    known.count("vocab_size", at_most=MAX_VOCAB)
    return _shape(folder, given, read_meta_model(folder, torch.float32), num_shards)


def _shape(folder: Path, given: ConfigJson, meta: MetaModel, num_shards: int | None) -> MeasuredShape:
    model, config = meta.model, meta.model.config
    sizes = weight_sizes(meta, lambda _, parameter: parameter.numel())
    total = sum(sizes.layers) + sizes.both
    if total > MAX_PARAMETERS:
        raise ModelError(f"{given.path}: it has {total} parameters; works: up to {MAX_PARAMETERS}", "Unsupported")
    experts, num_inactive = _experts(meta)
    num_chosen = 0 if experts is None else experts.num_experts_per_token
    shares, unshared = measure_shares(meta, num_chosen, num_shards)
    widest_call = max(meta.calls, key=lambda call: call.num_heads * call.page_dim)
    intermediate = widest(meta.layers, config.hidden_size, num_chosen)
    return MeasuredShape(
        architecture=type(model).__name__,
        num_layers=len(meta.layers),
        hidden_size=config.hidden_size,
        intermediate_size=intermediate,
        num_heads=widest_call.num_heads,
        num_kv_heads=widest_call.num_kv_heads,
        head_dim=widest_call.page_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=_num_positions(config),
        rms_norm_eps=1e-6,
        rope=RopeParameters(),
        layer_windows=tuple(call.window for call in meta.calls),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=bool(getattr(model, "all_tied_weights_keys", {})),
        checkpoint_dtype=checkpoint_dtype(given),
        eos_token_ids=eos_token_ids(folder, given, config.vocab_size),
        layer_parameters=sizes.layers,
        embedding_parameters=sizes.embedding,
        final_parameters=sizes.final,
        total_parameters=total,
        active_parameters=total - num_inactive,
        measured_experts=experts,
        layer_kv_sizes=tuple((call.num_kv_heads, call.page_dim) for call in meta.calls),
        widest=intermediate,
        can_be_staged=meta.can_be_staged,
        shares=shares,
        unshared=unshared,
    )


def _experts(meta: MetaModel) -> tuple[ExpertSizes | None, int]:
    """Returns the sizes of the routed experts, and the number of weights of the experts that a token does not use.

    transformers holds the experts of a layer as stacked matrices, [experts, rows, columns]. No other parameter has
    three dimensions.
    """
    config = meta.model.config
    parameters = dict(meta.model.named_parameters())
    stacked = {name: weight for name, weight in parameters.items() if weight.dim() == 3}
    if not stacked:
        return None, 0
    last = list(stacked.values())[-1]  # [experts, hidden size, width of an expert], or the last two exchanged
    num_experts = last.shape[0]
    chosen = [count for name in _CHOSEN_EXPERTS if isinstance(count := getattr(config, name, None), int)]
    num_chosen = min(chosen[0], num_experts) if chosen else num_experts
    num_expert_weights = sum(
        weight.numel() for name, weight in parameters.items() if name in stacked or ".experts." in name
    )
    num_inactive = num_expert_weights * (num_experts - num_chosen) // num_experts
    width = last.numel() // (num_experts * config.hidden_size)
    return ExpertSizes(num_experts, num_chosen, width), num_inactive


def _refuse_quantised(config: ConfigJson) -> None:
    if quantisation := config.mapping("quantization_config"):
        method = quantisation.get("quant_method", "unknown")
        raise ModelError(
            f"{config.path}: the checkpoint is quantised ({word(method)}), and the transformers backend serves "
            f"dense weights only; name a repository whose weights are {', '.join(DTYPES[:-1])} or {DTYPES[-1]}",
            "Unsupported",
        )


def _num_positions(config: Any) -> int:
    """Returns the longest context of a model. Configurations have different names for this field."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2048
