"""The configuration of a model that transformers implements, or the reason why it cannot be served. Reads no weight."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rayloom_engine.errors import ModelError, word
from rayloom_engine.models.checkpoint.config_json import ConfigJson, read_json

_WORKS = "works: decoder-only language models of transformers whose attention is the only memory of earlier tokens"

# Layers whose only memory is a KV cache.
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def read_config(folder: Path) -> tuple[Any, type[Any]]:
    """Returns transformers' configuration of the model in a folder, and the class of its causal language model.

    Raises ModelError for a model that is not decoder-only, keeps a state beside its KV cache, or needs code from its
    repository.
    """
    path = folder / "config.json"
    given = ConfigJson(path=path, values=read_json(path))
    model_type = word(given.get("model_type"))
    has_remote_code = bool(given.mapping("auto_map"))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except ValueError as error:
        if has_remote_code:
            raise unsupported(path, f"model type {model_type} needs code from its repository (auto_map)") from error
        raise unsupported(
            path, f"model type {model_type} is not known to transformers {transformers.__version__}"
        ) from error
    if config.is_encoder_decoder:
        raise unsupported(path, f"{model_type} is an encoder-decoder model")
    if (text_config := config.get_text_config()) is not config:
        alone = _text_model(path, model_type, text_config)
        raise unsupported(path, f"{model_type} has parts beside a text model, such as vision{alone}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unsupported(path, f"{model_type} has no causal language model in transformers")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    architectures = given.get("architectures")
    named = word(architectures[0]) if isinstance(architectures, list) and architectures else model_class.__name__
    if named != model_class.__name__:
        raise unsupported(path, f"architecture {named} is not {model_type}'s causal language model")
    _check_class(path, model_class)
    _check_layers(path, model_type, config)
    _check_rope(path, model_type, config)
    return config, model_class


def unsupported(path: Path, reason: str) -> ModelError:
    """Returns the error for a model that the transformers backend cannot serve."""
    return ModelError(f"{path}: {reason}; {_WORKS}", "Unsupported")


def _text_model(path: Path, model_type: str, text_config: Any) -> str:
    """Returns the end of a message, which names the text model's class; empty if the text model cannot be served."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    if model_class is None:
        return ""
    try:
        _check_class(path, model_class)
        _check_layers(path, model_type, text_config)
        _check_rope(path, model_type, text_config)
    except ModelError:
        return ""
    return f"; a checkpoint of its text model alone ({model_class.__name__}) can be served"


def _check_layers(path: Path, model_type: str, config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise unsupported(path, f"{model_type} has layers of the kind {', '.join(sorted(map(word, kinds)))}")


def _check_rope(path: Path, model_type: str, config: Any) -> None:
    """Refuses rotary embeddings that transformers recomputes from the longest sequence of a call.

    In the engine, a call has the sequences of many clients, and later steps read the keys of this call from the cache.
    So a key must not depend on the other sequences of the call.
    """
    of_model = getattr(config, "rope_parameters", None) or {}
    given = [each for each in (of_model, *of_model.values()) if isinstance(each, dict)]
    refused = [kind for kind in ("dynamic", "longrope") if any(each.get("rope_type") == kind for each in given)]
    if refused:
        raise unsupported(
            path, f"{model_type} has rope_type {' and '.join(refused)}, which works with the native backend alone"
        )


def _check_class(path: Path, model_class: type[Any]) -> None:
    name = model_class.__name__
    base = model_class.__mro__[1]
    if getattr(model_class, "_is_stateful", False) or getattr(base, "_is_stateful", False):
        raise unsupported(path, f"{name} has state-space, linear-attention or recurrent layers")
    if not model_class._can_set_attn_implementation():
        raise unsupported(path, f"{name} does not compute its attention through transformers' attention interface")
    # The decoders of Bart, Pegasus and others count positions from their own cache, which the engine does not use.
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise unsupported(path, f"{name} takes no position_ids, so it cannot compute several sequences in one step")
