"""Builds the models file (version v1) of an LLMGateway: the names that its gateway pods serve, and their engines.

The file is in a Secret, because it has the keys of the engines. The kubelet updates the mounted file and the gateway
reads it again, so an added service or a changed weight replaces no pod.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayloom_operator import names
from rayloom_operator.api.pods import Auth
from rayloom_operator.objects.gateway.companions import front_key
from rayloom_operator.objects.gateway.config import engines_dns

MODELS_FOLDER = "/etc/rayloom-models"
MODELS_KEY = "models.json"
_HASH_CHARS = 16
# Settings of spec.engine.args that gateway pods accept for each model. The other settings of
# `objects.gateway.config.GATEWAY_ARGS` apply to a whole server, which has several models here.
MODEL_ARGS = (
    *("max_body_bytes", "max_output_tokens", "max_queued_requests", "enable_priority", "generation_config"),
    *("tool_parser", "reasoning_parser", "max_logprobs", "enable_force_include_usage", "repeat_seconds"),
    *("return_tokens_as_token_ids", "enable_prompt_embeds"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A service that the gateway pods reach."""

    served_name: str
    service: str
    namespace: str
    uid: str
    auth: Auth | None  # API keys for this name; None: requests need no key
    settings: Mapping[str, Any] = field(default_factory=dict)  # the settings in MODEL_ARGS that the service sets
    adapters: tuple[str, ...] = ()  # names of the service's LoRA adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasEntry:
    """A further name, whose requests are distributed over one or several models."""

    name: str
    targets: tuple[tuple[str, int], ...]  # (served name, weight)
    is_sticky: bool  # all requests of one user go to the same target
    auth: Auth | None  # API keys for this name; None: requests need no key


def models_document(
    models: Sequence[ModelEntry], aliases: Iterable[AliasEntry], operator_key: bytes, previous_key: bytes = b""
) -> dict[str, Any]:
    """The document of the models file. Each entry names its own file of API keys, or none: no entry inherits keys.

    `previous_key`: the operator's key before `operator_key`, or empty. Keys of running engines may be derived from the
    previous key.
    """
    return {
        "version": "v1",
        "models": {
            each.served_name: {
                "engines_dns": engines_dns(each.service),
                "key": front_key(operator_key, each.namespace, each.uid),
                **_previous_key(previous_key, each),
                "api_key_file": keys_path(each.auth),
                "settings": dict(each.settings),
            }
            for each in models
        },
        "aliases": {
            each.name: {
                "targets": [{"model": model, "weight": weight} for model, weight in each.targets],
                "sticky_by": "user" if each.is_sticky else None,
                "api_key_file": keys_path(each.auth),
            }
            for each in aliases
        },
        # Gateway pods of an earlier release do not serve a model whose entry has an unknown field. So the adapters are
        # not part of the models' entries. An unknown field at the top level is only reported.
        "adapters": {each.served_name: list(each.adapters) for each in models if each.adapters},
    }


def models_text(document: Mapping[str, Any]) -> str:
    """Returns the content of the file."""
    return json.dumps(document, sort_keys=True)


def content_hash(text: str) -> str:
    """Returns the hash of a models file. A gateway pod's `/status` has the hash of the file that the pod has read."""
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARS]


def _previous_key(previous_key: bytes, model: ModelEntry) -> dict[str, str]:
    return {"previous_key": front_key(previous_key, model.namespace, model.uid)} if previous_key else {}


def keys_path(auth: Auth | None) -> str | None:
    """Returns the path of the file with these API keys; None without keys."""
    if auth is None:
        return None
    secret = auth.api_key_secret_ref
    return f"{names.KEYS_FOLDER}/{secret.name}/{secret.key}"
