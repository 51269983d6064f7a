"""Reads the shape of a model for a model backend: our own decoder, or transformers' modules.

Only a model of the transformers backend is measured with torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rayloom_engine.config import ModelBackend
from rayloom_engine.errors import ModelError, word
from rayloom_engine.models.checkpoint.config_json import ConfigJson, read_json, refuses_broken
from rayloom_engine.models.families import has_native_decoder, missing_in_decoder
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.on_transformers.child import measured_in_child
from rayloom_engine.models.shape import ModelShape, read_shape

_MAX_NAME = 256  # the most characters in the name of a class or of a model type


def read_model_shape(
    folder: Path, backend: ModelBackend = "auto", *, in_child: bool = False, num_shards: int | None = None
) -> ModelShape:
    """Returns the shape of the model in a Hugging Face folder: a MeasuredShape if transformers' modules compute it.

    With `auto`, transformers' modules compute all architectures that the native decoder does not have. They also
    compute a model whose config.json has a value that the native decoder does not support. `MeasuredShape.not_native`
    names this value. `in_child`: a child process measures the model, so that this process imports no torch.
    `num_shards`: as in `measured_shape`.

    Reads no weight. Raises ModelError if the backend cannot serve the model; the message names the reason.
    """
    path = folder / "config.json"
    with refuses_broken(path):
        config = ConfigJson(path=path, values=read_json(path))
        is_native = has_native_decoder(config)
        missing = missing_in_decoder(config) if backend == "auto" else ""
    if backend == "native" or (backend == "auto" and is_native and not missing) or not _names_a_class(config):
        return read_shape(folder)  # raises the error of a model that names no class
    if not missing:
        return _measured(folder, path, num_shards, in_child=in_child)
    try:
        measured = _measured(folder, path, num_shards, in_child=in_child)
    except ModelError as error:
        raise ModelError(
            f"{path}: neither backend serves this model. native: {missing}. transformers: {error}", error.fault
        ) from error
    return replace(measured, not_native=missing)


def _measured(folder: Path, path: Path, num_shards: int | None, *, in_child: bool) -> MeasuredShape:
    """Returns the shape of a model that transformers' modules compute. `path`: of config.json. Raises ModelError."""
    if in_child:
        return measured_in_child(folder, num_shards)
    try:
        from rayloom_engine.models.on_transformers.measure import measured_shape
    except ImportError as error:
        raise ModelError(
            f"{path}: the transformers backend is needed, and transformers cannot be imported: {word(str(error))}; "
            "install transformers 5.23 or newer",
            "Unsupported",
        ) from error
    with refuses_broken(path):
        return measured_shape(folder, num_shards)


def _names_a_class(config: ConfigJson) -> bool:
    """Returns whether model_type and architectures of a configuration are names that transformers could know."""
    model_type = config.get("model_type")
    architectures = config.get("architectures") or ["Model"]
    names = architectures if isinstance(architectures, list) else [architectures]
    are_names = all(isinstance(name, str) and name.isidentifier() and name.isascii() for name in names)
    return are_names and isinstance(model_type, str) and max(map(len, [model_type, *names])) <= _MAX_NAME
