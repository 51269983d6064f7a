"""The facts of some published models that come with the operator: `make facts` writes shipped_facts.json.

Those of a built-in model are used for every service, for its weights come with the engine's image. Those of a hub's
model serve `rayloom-operator plan` alone: a cluster inspects the model, because its token, its commit and its
configuration may differ.
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
    """Facts by spec.model.source."""
    document = json.loads(files("rayloom_operator.api").joinpath(FILE).read_text(encoding="utf-8"))
    return {source: ModelFacts.model_validate(facts) for source, facts in document.items()}


def builtin_facts(model: Model) -> ModelFacts | None:
    """The facts of a built-in model; None for every other source."""
    return shipped_facts().get(model.source) if model.source.startswith(_BUILTIN) else None


def known_facts(model: Model) -> ModelFacts | None:
    """The facts of a model at its main revision, where the operator ships them; else None."""
    return shipped_facts().get(model.source) if model.revision in (None, "main") else None
