"""Names of environment variables that the operator or KubeRay sets in an engine's pods, and a manifest may not.

Some of them switch off what protects an engine: Ray's token is asked for only while RAY_AUTH_MODE says so, and a shell
in the head's container runs KUBERAY_GEN_RAY_START_CMD. Others are the operator's own arrangements with the engine.
"""

from __future__ import annotations

import json

# Names of this kind may come with any version of Ray, KubeRay or the engine.
RESERVED_PREFIXES = ("KUBERAY_", "RAYLOOM_", "RAY_AUTH_")
# Names with a reserved prefix that are a user's to set.
FREE_NAMES = ("RAYLOOM_API_KEYS", "RAYLOOM_CACHE")
# How a pod finds the head of its Ray, how it proves itself to it, and where that keeps its state.
_NAMES = (
    "FQ_RAY_IP",
    "RAY_ADDRESS",
    "RAY_ENABLE_K8S_TOKEN_AUTH",
    "RAY_IP",
    "RAY_PORT",
    "RAY_REDIS_ADDRESS",
)
# Every reserved name that Ray, KubeRay or the engine reads today. What comes by `envFrom` has names that nobody knows
# before; a container that sets these itself is safe from it, because `env` wins over `envFrom`.
RESERVED_NAMES = (
    *_NAMES,
    "KUBERAY_GEN_RAY_START_CMD",
    "RAYLOOM_ALIVE_FILE",
    "RAYLOOM_NODE_NAME",
    "RAYLOOM_RANK_TOKEN",
    "RAYLOOM_TERMINATION_LOG",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
)
RESERVED_IN_WORDS = (
    "the operator sets this variable itself: remove it. Reserved are "
    f"{', '.join(_NAMES)}, and all that begin with {', '.join(RESERVED_PREFIXES)}, but {' and '.join(FREE_NAMES)} "
    "are free"
)
# The same for the API server, about a name as `self`.
RESERVED_RULE = (
    f"self in {json.dumps(FREE_NAMES)} || !(self in {json.dumps(_NAMES)} || "
    f"{' || '.join(f'self.startsWith({json.dumps(prefix)})' for prefix in RESERVED_PREFIXES)})"
)


def is_reserved(name: str) -> bool:
    """Whether a manifest may not set the environment variable `name`."""
    return name not in FREE_NAMES and (name in _NAMES or name.startswith(RESERVED_PREFIXES))
