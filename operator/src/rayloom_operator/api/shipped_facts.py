"""Facts of some published models, in shipped_facts.json, which `make facts` writes.

The facts of a built-in model are used for every service, because its weights are part of the engine's image. The facts
of a hub's model are used only by `rayloom-operator plan`. In a cluster such a model is inspected, because its commit
and configuration may differ, and the service's token may not give access to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.spec import Model

FILE = "shipped_facts.json"
_BUILTIN = "builtin://"


@cache
def shipped_facts() -> Mapping[str, ModelFacts]:
    """Returns spec.model.source -> facts, for all shipped models."""
    document = json.loads(files("rayloom_operator.api").joinpath(FILE).read_text(encoding="utf-8"))
    return {source: ModelFacts.model_validate(facts) for source, facts in document.items()}


def builtin_facts(model: Model) -> ModelFacts | None:
    """Returns the facts of a built-in model; None for every other source."""
    return shipped_facts().get(model.source) if model.source.startswith(_BUILTIN) else None


def known_facts(model: Model) -> ModelFacts | None:
    """Returns the shipped facts of a model; None if the model is not among them, or if the spec names a revision other
    than main.
    """
    return shipped_facts().get(model.source) if model.revision in (None, "main") else None
