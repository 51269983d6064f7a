"""Manifests of LLMGateways: the selector, the defaults, and the sentence about each mistake."""

import copy

import pytest

from rayloom_operator.api.llmgateway.spec import parse_gateway
from rayloom_operator.errors import SpecError
from rt_llmgateway import make_gateway_document

KEYS = {"apiKeySecretRef": {"name": "keys", "key": "all"}}


def make(**spec):
    return parse_gateway(make_gateway_document(**spec))


def test_the_defaults():
    spec = make().spec

    assert (spec.replicas, spec.hold_seconds, spec.drain_seconds) == (2, 300, 30)
    assert (spec.image, spec.auth, spec.aliases) == (None, None, ())


def test_an_alias_has_a_weight_of_1_and_sticks_to_the_user():
    (alias,) = make(aliases=[{"name": "assistant", "targets": [{"service": "chat"}]}]).spec.aliases

    assert (alias.targets[0].weight, alias.sticky_by) == (1, "user")


@pytest.mark.parametrize(
    ("selector", "labels", "is_selected"),
    [
        ({"matchLabels": {"team": "a"}}, {"team": "a", "more": "b"}, True),
        ({"matchLabels": {"team": "a"}}, {"team": "b"}, False),
        ({"matchLabels": {"team": "a"}}, {}, False),
        ({"matchLabels": {"team": ""}}, {"team": ""}, True),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]}, {"team": "b"}, True),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]}, {}, False),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}, {"team": "a"}, False),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}, {}, True),
        ({"matchExpressions": [{"key": "team", "operator": "Exists"}]}, {"team": "x"}, True),
        ({"matchExpressions": [{"key": "team", "operator": "Exists"}]}, {}, False),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, {}, True),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, {"team": "x"}, False),
        (
            {"matchLabels": {"team": "a"}, "matchExpressions": [{"key": "old", "operator": "DoesNotExist"}]},
            {"team": "a", "old": "1"},
            False,
        ),
    ],
)
def test_a_selector_means_what_it_means_in_kubernetes(selector, labels, is_selected):
    assert make(services=selector).spec.services.selects(labels) is is_selected


def alias(**parts):
    return {"aliases": [{"name": "assistant", "targets": [{"service": "chat"}], **parts}]}


# A wrong spec, and a part of the sentence about it. Each sentence has the given value or its place, the allowed values,
# and the cure.
BAD = {
    "no services": ({"services": None}, "spec.services: is missing; add it"),
    "an empty selector": (
        {"services": {}},
        "an empty selector selects nothing; add a label to matchLabels or matchExpressions",
    ),
    "empty labels": ({"services": {"matchLabels": {}}}, "an empty selector selects nothing"),
    "a list of names": ({"services": ["chat"]}, "['chat'] is not allowed; this must be a map"),
    "another selector": (
        {"services": {"labels": {"a": "b"}}},
        "services.labels: is not a field; remove it. Fields here: matchLabels, matchExpressions",
    ),
    "a label with a space": (
        {"services": {"matchLabels": {"a b": "c"}}},
        "a b: this is not the key of a label; write it as",
    ),
    "a number as label": (
        {"services": {"matchLabels": {"a": 1}}},
        "1 is not allowed; this must be text; put it in quotes",
    ),
    "an unknown operator": (
        {"services": {"matchExpressions": [{"key": "a", "operator": "Equals"}]}},
        "'Equals' is not allowed; use one of In, NotIn, Exists, DoesNotExist",
    ),
    "In without values": (
        {"services": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
        "operator In with 0 values: In and NotIn need values",
    ),
    "Exists with values": (
        {"services": {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}},
        "operator Exists with 1 values: In and NotIn need values; Exists and DoesNotExist take none",
    ),
    "too many pods": ({"replicas": 17}, "17 is not allowed: use 0 to 16 gateway pods"),
    "fewer than no pods": ({"replicas": -1}, "-1 is not allowed: use 0 to 16 gateway pods"),
    "a time as text": ({"holdSeconds": "5m"}, "spec.holdSeconds: '5m' is not allowed; this must be a whole number"),
    "a hold of weeks": ({"holdSeconds": 86401}, "86401 is too large; use 86400 or less"),
    "a path without a slash": ({"rootPath": "llm"}, "spec.rootPath: 'llm' is not allowed"),
    "a field of a service": ({"engine": {"args": {}}}, "spec.engine: is not a field; "),
    "a misspelt field": ({"drainSecond": 3}, "spec.drainSecond: is not a field; did you mean drainSeconds?"),
    "a gpu": ({"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "nvidia.com/gpu: a gateway uses cpu, memory and"),
    "a Secret without a key": (
        {"auth": {"apiKeySecretRef": {"name": "keys"}}},
        "apiKeySecretRef.key: is missing; add it",
    ),
    "an alias without targets": (alias(targets=[]), "an alias without targets cannot answer requests; add a target"),
    "an alias without a name": (
        {"aliases": [{"targets": [{"service": "chat"}]}]},
        "aliases[0].name: is missing; add it",
    ),
    "an alias with a space": (
        alias(name="my chat"),
        "'my chat' is not possible: use 1 to 256 letters, digits and signs",
    ),
    "an alias with a line": (alias(name="chat\n"), "'chat\\n' is not possible: use 1 to 256 letters, digits and signs"),
    "an alias beyond ASCII": (alias(name="tschüss"), "'tschüss' is not possible: use 1 to 256 letters, digits and"),
    "a negative weight": (
        alias(targets=[{"service": "chat", "weight": -1}]),
        "-1 is not allowed: use a weight from 0 to 1000",
    ),
    "a weight in percent": (
        alias(targets=[{"service": "chat", "weight": "90%"}]),
        "'90%' is not allowed; this must be a whole number",
    ),
    "too heavy": (
        alias(targets=[{"service": "chat", "weight": 1001}]),
        "1001 is not allowed: use a weight from 0 to 1000",
    ),
    "no weight at all": (
        alias(targets=[{"service": "chat", "weight": 0}]),
        "every target has weight 0; raise the weight",
    ),
    "a target twice": (
        alias(targets=[{"service": "chat"}] * 2),
        "chat is given more than once; keep one target of each",
    ),
    "sticky by address": (alias(stickyBy="ip"), "'ip' is not allowed; use one of user, none"),
    "an alias twice": (
        {"aliases": alias()["aliases"] * 2},
        "assistant is given more than once; keep one alias of each name",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_has_its_sentence(name):
    spec, sentence = BAD[name]
    document = make_gateway_document(**spec)
    document["spec"] = {field: value for field, value in document["spec"].items() if value is not None}
    before = copy.deepcopy(document)

    with pytest.raises(SpecError) as caught:
        parse_gateway(document)
    assert sentence in "; ".join(caught.value.problems)
    assert document == before


def test_a_long_name_is_refused():
    document = make_gateway_document()
    document["metadata"] = {"name": "a" * 41}

    with pytest.raises(SpecError, match="at most 40"):
        parse_gateway(document)


def test_a_key_secret_is_read_as_in_a_service():
    spec = make(auth=KEYS, **alias(auth=KEYS)).spec

    assert spec.auth == spec.aliases[0].auth


@pytest.mark.parametrize(("key", "is_possible"), [(".", False), ("..", False), ("..data", False), (".env", True)])
def test_only_keys_that_a_secret_can_have_are_accepted(key, is_possible):
    """`..` in the path of a file would make the API server refuse the pods of the whole LLMGateway."""
    auth = {"apiKeySecretRef": {"name": "keys", "key": key}}
    try:
        make(auth=auth)
    except SpecError as error:
        assert not is_possible
        assert error.problems == (
            f"spec.auth.apiKeySecretRef.key: {key!r} is not allowed. Key in the Secret's data: letters, digits, '-', "
            "'_' and '.'; it is not '.' and does not begin with '..'.",
        )
    else:
        assert is_possible
