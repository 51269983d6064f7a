"""Models that no engine could serve, as rows like those of bad_manifests.py."""

from __future__ import annotations

from typing import Any

_FOLDER = "pods mount the model at its own path"


def _at(source: str, **fields: Any) -> dict[str, Any]:
    return {"spec": {"model": {"source": source, **fields}}}


def _spec(model: dict[str, Any], **args: Any) -> dict[str, Any]:
    return {"spec": {"model": {"source": "builtin://smollm2-135m", **model}, "engine": {"args": args}}}


MODELS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("a model in the pods' own folder", _at("file:///tmp"), _FOLDER),
    ("a model among the keys", _at("file:///etc//rayloom-keys/m"), _FOLDER),
    ("a model outside of its claim", _at("pvc://claim/../etc"), "the path must not have a part '..'"),
    ("a model outside of its folder", _at("file:///data/../etc"), "the path must not have a part '..'"),
    (
        "a model where the cache is",
        _at("file:///cache", draft={"source": "hf://a/b"}, cache={"persistentVolumeClaim": "hub"}),
        "model.cache is mounted at /cache",
    ),
    (
        "an int8 model in float16",
        _spec({"dtype": "float16"}, quantization="int8"),
        "engine.args.quantization int8 works with model.dtype auto, bfloat16 or float32",
    ),
    (
        "an int8 model beside the device cuda",
        _spec({}, quantization="int8", device="cuda"),
        "engine.args.quantization int8 works on CPU only",
    ),
    (
        "an int8 model of transformers",
        _spec({}, quantization="int8", modelBackend="transformers"),
        "quantization int8 needs the engine's own decoder",
    ),
)
