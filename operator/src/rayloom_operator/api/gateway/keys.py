"""Refuses API keys in a variable beside gateway pods. Only engines get it, so gateway pods would serve everybody.

The rule applies to `gateway.replicas: 0` too: pods of an LLMGateway may serve the model, and do not get it either.
"""

from __future__ import annotations

from collections.abc import Iterable

from rayloom_operator.api.engine import EnvVar
from rayloom_operator.api.pod_template.container import Container

_VARIABLE = "RAYLOOM_API_KEYS"
_ENGINE = "engine"  # the container of head pods that reads the variable
KEYS_IN_WORDS = (
    f"{_VARIABLE} does not reach gateway pods, so they would serve everybody: put the keys into a Secret, name it in "
    "spec.auth.apiKeySecretRef, and remove the variable"
)
_CONTAINERS = "self.podTemplate.head.spec.containers"
KEYS_RULES = (
    (
        "!has(self.gateway) || has(self.auth) || !has(self.engine) || !has(self.engine.env) || "
        f"self.engine.env.all(each, each.name != '{_VARIABLE}')",
        KEYS_IN_WORDS,
    ),
    (
        "!has(self.gateway) || has(self.auth) || !has(self.podTemplate) || !has(self.podTemplate.head) || "
        f"!has(self.podTemplate.head.spec) || !has({_CONTAINERS}) || {_CONTAINERS}.all(each, each.name != '{_ENGINE}' "
        f"|| !has(each.env) || each.env.all(variable, variable.name != '{_VARIABLE}'))",
        KEYS_IN_WORDS,
    ),
)


def keys_problem(env: Iterable[EnvVar], engine: Container | None) -> str:
    """Returns a message if the variable gives API keys to engines behind gateway pods; empty if it does not.

    `env`: spec.engine.env. `engine`: the container of the head's template. Variables of `envFrom` cannot be checked.
    """
    of_template = (engine.env if engine is not None else None) or ()
    names = {each.name for each in env} | {each.name for each in of_template}
    return KEYS_IN_WORDS if _VARIABLE in names else ""
