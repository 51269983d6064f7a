"""Simulated gateways: their answers to `/status`, and the tokenizer that each pod copies from an engine.

As in the real gateway, the tokenizer is in the pod's own volume. So a recreated pod becomes ready only when an engine
of its services serves.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

SERVICE_LABEL = "rayloom.dev/service"
_LABELS = ("rayloom.dev/gateway", "rayloom.dev/llmgateway")


def is_gateway(pod: dict[str, Any]) -> bool:
    """Returns True for a gateway pod, of an LLMService or of an LLMGateway."""
    return any(label in pod["metadata"].get("labels", {}) for label in _LABELS)


def secret_name(pod: dict[str, Any]) -> str:
    """Returns the name of the Secret in the pod's configuration volume."""
    sources = next(each for each in pod["spec"]["volumes"] if each["name"] == "config")["projected"]["sources"]
    return str(next(each["secret"]["name"] for each in sources if "secret" in each))


def services_of(pod: dict[str, Any], secret: dict[str, Any]) -> list[str]:
    """Returns the LLMServices that a gateway pod serves: its own, or those in the models file of its Secret."""
    labels = pod["metadata"].get("labels", {})
    if SERVICE_LABEL in labels:
        return [labels[SERVICE_LABEL]]
    models = json.loads(_models_file(secret))["models"]
    return [each["engines_dns"].partition(":")[0].removesuffix("-engines") for each in models.values()]


def models_hash(secret: dict[str, Any]) -> str:
    """Returns the hash of the models file in the Secret of an LLMGateway's pods; empty in other Secrets."""
    return hashlib.sha256(_models_file(secret)).hexdigest()[:16] if "models.json" in secret["data"] else ""


def _models_file(secret: dict[str, Any]) -> bytes:
    return base64.b64decode(secret["data"]["models.json"])


@dataclass(slots=True, kw_only=True)
class Gateway:
    """One simulated gateway, whose requests a test sets."""

    token: str
    has_text: bool = False
    num_held: int = 0  # waiting sequences
    held_tokens: int = 0
    in_flight: int = 0  # requests that engines compute
    num_finished: int = 0
    num_asked: int = 0
    models_hash: str = ""  # hash of the models file that the gateway has read; empty for a gateway with one model
    refusal: str = ""  # why the gateway cannot use a newer models file
    unusable_keys: tuple[str, ...] = ()  # names of models whose API keys the gateway cannot read
    started_at: float = field(default_factory=time.monotonic)

    @property
    def is_ready(self) -> bool:
        """True if the readiness probe of the gateway's container would succeed."""
        return self.has_text

    def document(self) -> dict[str, Any]:
        """The answer to `/status`, version v1, in the fields that the operator reads."""
        return {
            "version": "v1",
            "engine_version": "0.1.0",
            "state": "serving" if self.has_text else "starting",
            "reason": "" if self.has_text else "waiting for an engine",
            "last_token_age_seconds": None,
            "uptime_seconds": time.monotonic() - self.started_at,
            "model": None,
            "startup": [],
            "ranks": [],
            "requests": {
                "in_flight": self.in_flight + self.num_held,
                "running": 0,
                "waiting": self.num_held,
                "finished": self.num_finished,
                "failed": 0,
                "first_token_seconds": {},
            },
            "load": {"queued_tokens": self.held_tokens},
            "models_file": {"hash": self.models_hash, "refusal": self.refusal},
            "unusable_keys": [{"name": name, "problem": "missing", "accepted": 0} for name in self.unusable_keys],
        }
