"""The system_fingerprint of answers.

It is equal on servers that compute the same tokens, and differs between servers whose tokens may differ.
"""

from __future__ import annotations

import hashlib
import json

from rayloom_engine.config import EngineConfig
from rayloom_engine.front.operations.service import ENGINE_VERSION
from rayloom_engine.protocol.messages import ServedModel


def fingerprint(config: EngineConfig, model: ServedModel) -> str:
    """Returns "rl-" and twelve hexadecimal digits: a hash of everything that decides which tokens a seed gives.

    It is equal on all replicas of a configuration, so the folder in which a hub model is cached does not count.
    """
    parts = (
        ENGINE_VERSION,
        config.model,
        model.commit,
        model.architecture,
        model.num_parameters,
        model.dtype,
        model.compute_dtype,
        model.quantization,
        config.tensor_parallel_size,
    )
    return "rl-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
