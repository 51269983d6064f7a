"""Names of environment variables that a manifest may not set, because the operator or KubeRay sets them.

Some of these variables protect an engine. Ray requires its token only if RAY_AUTH_MODE is `token`. A shell in the
head's container runs the value of KUBERAY_GEN_RAY_START_CMD. The operator configures the engine with the other
variables.
"""

from __future__ import annotations

import json

# All names with these prefixes are reserved: new versions of Ray, KubeRay and the engine may add such names.
RESERVED_PREFIXES = ("KUBERAY_", "RAYLOOM_", "RAY_AUTH_")
# Names with a reserved prefix that a manifest may set.
FREE_NAMES = ("RAYLOOM_API_KEYS", "RAYLOOM_CACHE", "RAYLOOM_KERNELS")
# Reserved names without such a prefix. These variables give the address of Ray's head, the authentication, and the
# place where Ray's head stores its state.
_NAMES = (
    "FQ_RAY_IP",
    "RAY_ADDRESS",
    "RAY_ENABLE_K8S_TOKEN_AUTH",
    "RAY_IP",
    "RAY_PORT",
    "RAY_REDIS_ADDRESS",
)
# Every reserved name that Ray, KubeRay or the engine reads today. The keys of a ConfigMap or Secret in `envFrom` cannot
# be checked here. So the operator's own containers set all these names in `env`, which overrides `envFrom`.
RESERVED_NAMES = (
    *_NAMES,
    "KUBERAY_GEN_RAY_START_CMD",
    "RAYLOOM_ALIVE_FILE",
    "RAYLOOM_LEAN_RAY",
    "RAYLOOM_NODE_NAME",
    "RAYLOOM_RANK_TOKEN",
    "RAYLOOM_TERMINATION_LOG",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
)
RESERVED_IN_WORDS = (
    "the operator sets this variable itself: remove it. Reserved are "
    f"{', '.join(_NAMES)}, and all names that begin with {', '.join(RESERVED_PREFIXES)}, except "
    f"{', '.join(FREE_NAMES[:-1])} and {FREE_NAMES[-1]}"
)
# The same check as a CEL rule, where `self` is the name.
RESERVED_RULE = (
    f"self in {json.dumps(FREE_NAMES)} || !(self in {json.dumps(_NAMES)} || "
    f"{' || '.join(f'self.startsWith({json.dumps(prefix)})' for prefix in RESERVED_PREFIXES)})"
)


def is_reserved(name: str) -> bool:
    """True if a manifest may not set the environment variable `name`."""
    return name not in FREE_NAMES and (name in _NAMES or name.startswith(RESERVED_PREFIXES))
