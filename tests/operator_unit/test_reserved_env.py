"""Environment variables that a manifest may not set: the operator and the API server refuse the same names."""

import pytest

from rayloom_operator.api.pod_template.reserved_env import (
    FREE_NAMES,
    RESERVED_IN_WORDS,
    RESERVED_NAMES,
    RESERVED_RULE,
    is_reserved,
)
from rayloom_operator.api.spec import parse
from rayloom_operator.errors import SpecError
from rt_world import service

TRIED = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS", "KUBERAY_GEN_RAY_START_CMD", "RAYLOOM_TERMINATION_LOG")


def with_variable(name):
    return service(engine={"env": [{"name": name, "value": "disabled"}]})


@pytest.mark.parametrize("name", [*TRIED, *RESERVED_NAMES, "RAY_AUTH_OF_TOMORROW", "RAYLOOM_OF_TOMORROW"])
def test_a_reserved_name_is_refused_with_the_cure(name):
    with pytest.raises(SpecError) as caught:
        parse(with_variable(name))

    assert caught.value.problems == (f"spec.engine.env[0].name: {name}: {RESERVED_IN_WORDS}",)


FREE = (*FREE_NAMES, "RAY_memory_monitor_refresh_ms", "RAY_DEDUP_LOGS", "NCCL_DEBUG", "MY_RAY_IP")


@pytest.mark.parametrize("name", FREE)
def test_other_names_are_accepted(name):
    assert not is_reserved(name)
    assert parse(with_variable(name)).spec.engine.env[0].name == name


def test_the_rule_of_the_api_server_accepts_the_same_names():
    # With these replacements the rule becomes a Python expression.
    words = {"||": " or ", "!(": " not (", "startsWith": "startswith"}
    rule = RESERVED_RULE
    for word, python in words.items():
        rule = rule.replace(word, python)
    for name in (*TRIED, *RESERVED_NAMES, *FREE):
        assert eval(rule, {"self": name}) is not is_reserved(name), name
