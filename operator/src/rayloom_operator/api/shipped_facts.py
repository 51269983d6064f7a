"""Facts of built-in and of published models, in builtin_facts.json and published_facts.json, which `make facts` writes.

The facts of a built-in model are used for every service, because its weights are part of the engine's image. The facts
of a hub's model are used only by `rayloom-operator plan`. In a cluster, a Job inspects such a model. The model's commit
and configuration may differ from the shipped facts, and the service's token may not give access to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from rayloom_operator.api.model import Model
from rayloom_operator.api.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model of the hub. Either `facts` or `refusal` is set."""

    sources: tuple[str, ...]  # values of spec.model.source whose models have the same size
    facts: ModelFacts | None
    refusal: str  # why the engine cannot serve the model


@cache
def builtin_models() -> Mapping[str, ModelFacts]:
    """Returns spec.model.source -> facts, for all built-in models."""
    return {source: ModelFacts.model_validate(facts) for source, facts in _read("builtin_facts.json").items()}


@cache
def published_models() -> Mapping[str, PublishedModel]:
    """Returns name -> model, for the published models that the operator knows."""
    return {
        name: PublishedModel(
            sources=tuple(found["sources"]),
            facts=ModelFacts.model_validate(found["facts"]) if "facts" in found else None,
            refusal=found.get("refusal", ""),
        )
        for name, found in _read("published_facts.json").items()
    }


def shipped_facts() -> Mapping[str, ModelFacts]:
    """Returns spec.model.source -> facts, for all models whose facts come with the operator."""
    published = {
        source: model.facts
        for model in published_models().values()
        for source in model.sources
        if model.facts is not None
    }
    return {**builtin_models(), **published}


def builtin_facts(model: Model) -> ModelFacts | None:
    """Returns the facts of a built-in model and its draft model; None if one of the two is not built in."""
    known = builtin_models()
    return _with_draft(known.get(model.source), model, known)


def known_facts(model: Model, backend: str | None) -> ModelFacts | None:
    """Returns the shipped facts of a model and its draft model; None if no facts of one of the two are shipped.

    Also None if the spec names a revision other than main, or a backend that computes the model in another way, or if
    the engine would refuse the draft model.

    `backend`: as in spec.engine.args.modelBackend.
    """
    if model.revision not in (None, "main"):
        return None
    known = shipped_facts()
    facts = known.get(model.source)
    is_same = facts is not None and backend in (None, "auto", facts.shape.model_backend or "native")
    return _with_draft(facts, model, known) if is_same else None


def known_refusal(model: Model, backend: str | None) -> str:
    """Returns why the engine cannot serve a published model; empty if no reason is known before an inspection."""
    if model.revision not in (None, "main") or backend not in (None, "auto"):
        return ""
    refusals = (each.refusal for each in published_models().values() if model.source in each.sources)
    return next(refusals, "")


def _with_draft(facts: ModelFacts | None, model: Model, known: Mapping[str, ModelFacts]) -> ModelFacts | None:
    """Returns `facts` with those of the draft model of `model`; None if `known` does not have the draft model."""
    if facts is None or model.draft is None:
        return facts
    found = known.get(model.draft.source) if model.draft.revision in (None, "main") else None
    draft = None if found is None else found.as_draft()
    return None if draft is None else facts.model_copy(update={"draft": draft})


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(files("rayloom_operator.api").joinpath(name).read_text(encoding="utf-8"))
    return document
