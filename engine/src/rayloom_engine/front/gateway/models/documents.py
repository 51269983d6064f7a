"""Documents about all models of a gateway: the list of models, and the admin port's /engines and /status."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rayloom_engine.front.gateway.models.gateway_status import MAX_NAMES, UnusableKeys, shortened
from rayloom_engine.front.gateway.models.key_ring import KeyRing
from rayloom_engine.front.gateway.models.models_document import AliasEntry
from rayloom_engine.front.gateway.models.running_model import RunningModel
from rayloom_engine.front.openai.models import adapter_card, model_card
from rayloom_engine.front.operations.engines_document import engines_document


def card(name: str, alias: AliasEntry | None, models: Mapping[str, RunningModel], created: int) -> dict[str, Any]:
    """Returns the entry of a name in the list of models. `created`: Unix time of the gateway's start."""
    if alias is None:
        return model_card(models[name].service)
    used = [(model, weight) for model, weight in alias.weights if weight]
    lengths = [model_card(models[model].service)["max_model_len"] for model, _ in used]
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "rayloom",
        "root": max(used, key=lambda target: target[1])[0],
        "parent": None,
        "max_model_len": min((length for length in lengths if length is not None), default=None),
        "targets": [{"model": model, "weight": weight} for model, weight in alias.weights],
    }


def adapter_cards(model: RunningModel) -> list[dict[str, Any]]:
    """Returns the entries of a model's LoRA adapters in the list of models.

    `root`, the adapter's folder, is empty until an engine has reported the adapter.
    """
    adapters = model.service.engine_adapters
    base = model_card(model.service)
    awaited = [{**base, "id": name, "root": "", "parent": base["id"]} for name in adapters.awaited]
    return [*(adapter_card(model.service, entry) for entry in adapters.entries), *awaited]


def engines_of_models(models: Mapping[str, RunningModel], leaving: Iterable[RunningModel]) -> dict[str, Any]:
    """Returns the /engines documents of all models. `leaving`: removed models that still have running requests."""
    return {
        "models": {name: engines_document(model.service.client) for name, model in models.items()},
        "leaving": [{"model": model.name, **engines_document(model.service.client)} for model in leaving],
    }


def status_of_models(models: Mapping[str, RunningModel]) -> dict[str, Any]:
    """Returns the /status document of each model."""
    return {name: json.loads(model.service.status_json(is_minimal=False)) for name, model in models.items()}


def unusable_keys(ring: KeyRing) -> list[UnusableKeys]:
    """Returns the names whose files of API keys cannot be used, at most MAX_NAMES of them."""
    return [
        UnusableKeys(name=name, problem=shortened(problem), accepted=accepted)
        for name, problem, accepted in ring.unusable()[:MAX_NAMES]
    ]
