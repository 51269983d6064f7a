"""Manifests that cannot be served, and the sentence that `kubectl apply` answers each with.

Each row: what is wrong, the spec (or the whole manifest, where it has a kind), and a part of the sentence that says
what to change.
"""

from __future__ import annotations

from typing import Any

_MODEL = {"source": "builtin://smollm2-135m"}
_SOURCES = "use one of hf://ORG/NAME"


def _spec(**fields: Any) -> dict[str, Any]:
    return {"spec": {"model": _MODEL, **fields}}


def _model(**fields: Any) -> dict[str, Any]:
    return {"spec": {"model": {**_MODEL, **fields}}}


def _engine(**fields: Any) -> dict[str, Any]:
    return _spec(engine=fields)


def _args(**fields: Any) -> dict[str, Any]:
    return _engine(args=fields)


def _named(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, **_spec()}


_NAME = "at most 40 lower-case letters, digits and '-', beginning with a letter"

AT_ADMISSION: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("no spec", {}, "spec: Required value"),
    ("spec is a list", {"spec": []}, "spec in body must be of type object"),
    ("empty spec", {"spec": {}}, "spec.model: Required value"),
    ("model is a string", {"spec": {"model": "builtin://smollm2-135m"}}, "spec.model in body must be of type object"),
    ("no source", {"spec": {"model": {}}}, "spec.model.source: Required value"),
    ("a source without a scheme", _model(source="Qwen/Qwen3-8B"), _SOURCES),
    ("a source with an unknown scheme", _model(source="s3://bucket/model"), _SOURCES),
    ("a hub source without an organisation", _model(source="hf://Qwen3-8B"), _SOURCES),
    ("a hub source with a revision in it", _model(source="hf://Qwen/Qwen3-8B@main"), _SOURCES),
    ("a hub source with three parts", _model(source="hf://a/b/c"), _SOURCES),
    ("a relative file source", _model(source="file://models/x"), _SOURCES),
    ("a file source without a path", _model(source="file:///"), _SOURCES),
    ("an unknown builtin", _model(source="builtin://llama"), _SOURCES),
    ("a source in capitals", _model(source="HF://Qwen/Qwen3-8B"), _SOURCES),
    ("an empty source", _model(source=""), _SOURCES),
    ("a source that is a number", _model(source=7), "must be of type string"),
    ("a source that is too long", _model(source="file:///" + "x" * 1100), "may not be more than 1024"),
    ("a revision of a builtin model", _model(revision="main"), "remove it, or use an hf:// source"),
    ("an empty revision", _model(source="hf://a/b", revision=""), "should be at least 1 chars long"),
    ("an empty served name", _model(servedName=""), "should be at least 1 chars long"),
    ("an unknown dtype", _model(dtype="fp16"), 'supported values: "auto", "bfloat16", "float16", "float32"'),
    ("a dtype in capitals", _model(dtype="BFLOAT16"), 'supported values: "auto"'),
    ("a restart at no time", _spec(restartedAt="now"), "this is no time; use a time such as 2026-11-24T08:00:00Z"),
    ("a restart in a thirteenth month", _spec(restartedAt="2026-13-01T00:00:00Z"), "this is no time"),
    ("a restart without a zone", _spec(restartedAt="2026-11-24T08:00:00"), "this is no time"),
    ("a maxModelLen of 1", _model(maxModelLen=1), "should be greater than or equal to 2"),
    ("a maxModelLen in text", _model(maxModelLen="8k"), "must be of type integer"),
    ("a maxModelLen with a fraction", _model(maxModelLen=8192.5), "must be of type integer"),
    ("vLLM's name of a field", _model(max_model_len=8192), 'unknown field "spec.model.max_model_len"'),
    ("a misspelt field of the model", _model(soruce="x"), 'unknown field "spec.model.soruce"'),
    ("a misspelt part of the spec", _spec(paralelism={"tensor": 2}), 'unknown field "spec.paralelism"'),
    ("a field of a later version", _spec(autoscalingg={}), 'unknown field "spec.autoscalingg"'),
    ("a tensor of 0", _spec(parallelism={"tensor": 0}), "should be greater than or equal to 1"),
    ("a negative pipeline", _spec(parallelism={"pipeline": -2}), "should be greater than or equal to 1"),
    ("a tensor beyond any machine", _spec(parallelism={"tensor": 5000}), "should be less than or equal to 1024"),
    ("a tensor in text", _spec(parallelism={"tensor": "two"}), "must be of type integer"),
    ("parallelism as a number", _spec(parallelism=2), "spec.parallelism in body must be of type object"),
    ("negative replicas", _spec(replicas=-1), "replicas"),
    ("a roll that may move nothing", _spec(rollout={"maxSurge": 0, "maxUnavailable": 0}), "raise one of them"),
    ("replicas in text", _spec(replicas="one"), "must be of type integer"),
    ("a negative drain", _spec(drainSeconds=-1), "should be greater than or equal to 0"),
    ("a drain of days", _spec(drainSeconds=1_000_000), "should be less than or equal to 86400"),
    ("a drain with a unit", _spec(drainSeconds="30s"), "must be of type integer"),
    ("an empty image", _engine(image=""), "should be at least 1 chars long"),
    ("an unknown pull policy", _engine(imagePullPolicy="Sometimes"), 'supported values: "Always"'),
    ("a memory without meaning", _engine(resources={"requests": {"memory": "lots"}}), "memory"),
    ("memory as a number", _engine(resources={"limits": {"memory": 8}}), "must be of type string"),
    ("a negative cpu", _engine(resources={"requests": {"cpu": "-1"}}), "cpu"),
    ("an unknown argument of the engine", _args(gpuMemoryUtilization=0.9), "gpuMemoryUtilization"),
    ("an unknown device", _args(device="tpu"), 'supported values: "auto", "cpu", "cuda"'),
    ("no sequences at once", _args(maxNumSeqs=0), "should be greater than or equal to 1"),
    ("one KV block", _args(numKvBlocks=1), "should be greater than or equal to 2"),
    ("an unknown log level", _args(logLevel="trace"), 'supported values: "debug"'),
    ("a variable without a value", _engine(env=[{"name": "A"}]), "value: Required value"),
    ("a variable's value that is a number", _engine(env=[{"name": "A", "value": 1}]), "must be of type string"),
    ("a variable's name with a dash", _engine(env=[{"name": "A-B", "value": "1"}]), "should match"),
    ("a variable twice", _engine(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]), "uplicate"),
    ("variables as a map", _engine(env={"A": "1"}), 'unknown field "spec.engine.env.A"'),
    ("a name with capitals", _named("Chat"), "lowercase RFC 1123"),
    ("a name with a dot", _named("chat.v1"), _NAME),
    ("a name that begins with a digit", _named("8b"), _NAME),
    ("a name of 41 letters", _named("a" * 41), _NAME),
)
