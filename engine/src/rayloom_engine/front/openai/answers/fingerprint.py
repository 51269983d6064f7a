"""The system_fingerprint of answers.

This hash is equal on servers that compute the same tokens, and differs between servers whose tokens may differ.
"""

from __future__ import annotations

import hashlib
import json

from rayloom_engine.config import EngineConfig
from rayloom_engine.core.adapter import Adapter
from rayloom_engine.front.operations.service import ENGINE_VERSION
from rayloom_engine.protocol.messages import ServedModel


def fingerprint(config: EngineConfig, model: ServedModel, adapter: Adapter | None = None) -> str:
    """Returns "rl-" and twelve hexadecimal digits: a hash of all properties that decide which tokens a seed gives.

    The hash is equal on all replicas of a configuration. So it leaves out the folders of cached hub models and of
    adapters. `adapter`: the LoRA adapter of the request.
    """
    parts: list[object] = [
        ENGINE_VERSION,
        config.model,
        model.commit,
        model.architecture,
        model.num_parameters,
        model.dtype,
        model.compute_dtype,
        model.quantization,
        config.tensor_parallel_size,
    ]
    if adapter is not None:
        parts.append(adapter.digest.hex())
    return "rl-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
