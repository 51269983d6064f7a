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
    the draft model needs a backend other than the engine's own. Windows are compared by `draft_conflict`. Tokenizers
    are not part of facts, so only an inspection compares them.

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


def draft_conflict(model: Model) -> str:
    """Returns why the engine refuses the draft model beside this model, if their shipped facts show it; else empty."""
    target, draft = _shipped_pair(model)
    if target is None or draft is None or target.costs is None or draft.costs is None:
        return ""
    own, span = target.costs.attention_span, draft.costs.attention_span
    if own is None or (span is not None and span <= own):
        return ""
    seen = "all positions" if span is None else f"{span} positions"
    return f"the draft model attends to {seen}, and the model to {own}; use one whose sliding windows are not wider"


def vocabularies(model: Model) -> tuple[int, int] | None:
    """Returns the rows of the embeddings of a model and its draft model; None if no facts of one of them are shipped.

    Models with the same tokenizer may have different numbers of rows, because they are padded to different numbers.
    """
    target, draft = _shipped_pair(model)
    return None if target is None or draft is None else (target.shape.vocab_size, draft.shape.vocab_size)


def _shipped_pair(model: Model) -> tuple[ModelFacts | None, ModelFacts | None]:
    """Returns the shipped facts of a model and of its draft model, as far as there are any."""
    known = shipped_facts()
    return known.get(model.source) if model.revision in (None, "main") else None, _draft_of(model, known)


def _draft_of(model: Model, known: Mapping[str, ModelFacts]) -> ModelFacts | None:
    draft = model.draft
    return known.get(draft.source) if draft is not None and draft.revision in (None, "main") else None


def _with_draft(facts: ModelFacts | None, model: Model, known: Mapping[str, ModelFacts]) -> ModelFacts | None:
    """Returns `facts` with those of the draft model of `model`; None if `known` does not have the draft model."""
    if facts is None or model.draft is None:
        return facts
    found = _draft_of(model, known)
    draft = None if found is None else found.as_draft()
    return None if draft is None else facts.model_copy(update={"draft": draft})


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(files("rayloom_operator.api").joinpath(name).read_text(encoding="utf-8"))
    return document
