"""The ConfigMap that holds a group's EngineConfig document."""

from __future__ import annotations

import json

from rayloom_operator.api import LLMService
from rayloom_operator.engine_config import pod_engine_config
from rayloom_operator.names import Manifest, group_name, labels, metadata

CONFIG_KEY = "config.json"


def config_map(service: LLMService, revision: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, group_name(service.metadata.name, revision), labels(service, revision)),
        "data": {CONFIG_KEY: json.dumps(pod_engine_config(service), indent=2, sort_keys=True) + "\n"},
    }
