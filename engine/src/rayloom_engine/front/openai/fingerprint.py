"""The system_fingerprint of answers: equal for servers that compute the same tokens, different where they may not."""

from __future__ import annotations

import hashlib
import json

from rayloom_engine.config import EngineConfig
from rayloom_engine.front.operations.service import ENGINE_VERSION
from rayloom_engine.protocol.messages import ServedModel


def fingerprint(config: EngineConfig, model: ServedModel) -> str:
    """ "rl-" and twelve hexadecimal digits of a hash of all facts that determine the tokens of a seed.

    Replicas of one configuration have the same one: the cache folder of a hub's model is no part of it.
    """
    parts = (
        ENGINE_VERSION,
        config.model,
        model.commit,
        model.architecture,
        model.num_parameters,
        model.dtype,
        model.compute_dtype,
        config.tensor_parallel_size,
    )
    return "rl-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
