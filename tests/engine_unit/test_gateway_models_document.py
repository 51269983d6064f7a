"""The document of several models: accepted values, and a sentence for each wrong value. No sentence contains a key."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.errors import ConfigError
from rayloom_engine.front.gateway.gateway_config import parse_gateway_config
from rayloom_engine.front.gateway.models.models_document import parse_models

KEY = "secret-0123456789"
WHOLE: dict[str, Any] = {
    "version": "v1",
    "models": {
        "chat": {"engines_dns": "chat-engines:8003", "key": KEY, "settings": {"tool_parser": "hermes"}},
        "next": {"engines": {"first": "10.0.0.7:8003"}, "key": KEY, "api_key_file": "/keys", "settings": {}},
    },
    "aliases": {
        "assistant": {
            "targets": [{"model": "chat", "weight": 90}, {"model": "next", "weight": 10}],
            "sticky_by": "user",
            "api_key_file": None,
        }
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """WHOLE with another value at `path`; None removes the field."""
    document = copy.deepcopy(WHOLE)
    *folders, last = path.split("/")
    place: Any = document
    for part in folders:
        place = place[int(part) if isinstance(place, list) else part]
    if value is None:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return document


def test_a_whole_document_is_read() -> None:
    found = parse_models(WHOLE)
    assert found.problems == ()
    parsed = found.document
    assert parsed.models["chat"].given_settings == {"tool_parser": "hermes"}
    assert parsed.models["next"].given_settings == {}
    assert parsed.aliases["assistant"].weights == (("chat", 90), ("next", 10))
    assert parse_models({"version": "v1", "models": {}}).document.models == {}


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("adapters", ["sql"], "adapters: this value is not allowed; this must be an object or null"),
        ("adapters", {"chat": "sql"}, "adapters.chat: this value is not allowed; this must be a list"),
        ("adapters", {"chat": [3]}, "adapters.chat.0: 3 is not allowed; this must be a string"),
        ("modells", {}, "the document: there is no field modells; the fields are version, models, aliases, adapters"),
        ("models/chat/engine_dns", "h:1", "models.chat: there is no field engine_dns; the fields are engines_dns"),
        ("models/chat/key", None, "models.chat.key: missing; copy the content of the engines' front_key_file"),
        ("models/chat/key", "secret-short", "models.chat.key: must be a string with at least 16 characters"),
        (
            "models/chat/previous_key",
            "secret-short",
            "models.chat.previous_key: must be a string with at least 16 characters",
        ),
        ("models/chat/key", ["secret-0"], "models.chat.key: must be a string with at least 16 characters"),
        ("models/chat/engines_dns", None, "models.chat: give either engines_dns or engines, and at least one engine"),
        ("models/chat/engines", {"first": "h:1"}, "models.chat: give either engines_dns or engines"),
        ("models/next/engines", {}, "models.next: give either engines_dns or engines, and at least one engine"),
        ("models/next/engines", {"first": "h"}, "models.next.engines.first: 'h' is not an address; write HOST:PORT"),
        ("models/chat/engines_dns", "h", "models.chat.engines_dns: 'h' is not an address; write HOST:PORT"),
        (
            "models/chat/settings/port",
            1,
            "models.chat.settings: port is not a setting of one model; a model may have gen",
        ),
        ("models/chat/settings/tool", 1, "models.chat.settings: no setting tool; a model may have gen"),
        (
            "models/chat/settings/max_output_tokens",
            "9",
            'max_output_tokens: "9" is not allowed; this must be a whole number or null',
        ),
        ("models/a b", {"engines_dns": "h:1", "key": KEY}, 'models.a b: "a b" is no name of a model; write 1 to 256'),
        ("aliases/chat", WHOLE["aliases"]["assistant"], "aliases.chat: a model has this name already"),
        ("aliases/assistant/targets", [], "aliases.assistant.targets: is empty; give it at least one entry"),
        (
            "aliases/assistant/targets/0/model",
            "assistant",
            'aliases.assistant.targets: there is no model "assistant"; name one of `models`',
        ),
        ("aliases/assistant/targets/1/model", "chat", "aliases.assistant.targets: a model is named twice"),
        ("aliases/assistant/targets/0/weight", -1, "targets.0.weight: -1 is too small; use 0 to 1000000"),
        (
            "aliases/assistant/targets/0/weight",
            0.5,
            "targets.0.weight: 0.5 is not allowed; this must be a whole number",
        ),
        ("aliases/assistant/targets", [{"model": "chat", "weight": 0}], "every weight is 0; give at least one target"),
        ("aliases/assistant/sticky_by", "key", 'sticky_by: "key" is not allowed; use "user" or null'),
    ],
)
def test_a_wrong_field_is_named(path: str, value: Any, sentence: str) -> None:
    found = parse_models(changed(path, value))
    assert any(sentence in problem for problem in found.problems)
    assert "secret-" not in str(found.problems)


@pytest.mark.parametrize(
    ("path", "value", "models", "targets"),
    [
        ("modells", {}, "chat next", ["chat", "next"]),
        ("models/chat/key", "short", "next", ["next"]),
        ("models/chat/engines_dns", "h", "next", ["next"]),
        ("models/chat/settings/port", 1, "next", ["next"]),
        ("models/a b", {"engines_dns": "h:1", "key": KEY}, "chat next", ["chat", "next"]),
        ("models/assistant", {"engines_dns": "h", "key": KEY}, "chat next", None),
        ("aliases/assistant/targets", [], "chat next", None),
        ("aliases/assistant/targets/1/model", "chat", "chat next", None),
        ("aliases/assistant/targets/1/model", "none", "chat next", ["chat"]),
        ("aliases/assistant/targets", [{"model": "none", "weight": 1}], "chat next", None),
        ("aliases", [], "chat next", None),
    ],
)
def test_only_the_wrong_entries_are_left_out(path: str, value: Any, models: str, targets: list[str] | None) -> None:
    found = parse_models(changed(path, value))
    assert list(found.document.models) == models.split()
    alias = found.document.aliases.get("assistant")
    assert (None if alias is None else [target.model for target in alias.targets]) == targets
    assert found.problems


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([], "the document: this value is not allowed; this must be an object"),
        (changed("version", None), "version: missing"),
        (changed("version", "v2"), 'version: "v2" is not allowed; use "v1"'),
        (changed("models", None), "models: missing"),
        (changed("models", [KEY]), "models: this value is not allowed; this must be an object"),
    ],
)
def test_a_document_of_another_kind_is_refused_as_a_whole(document: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_models(document)
    assert sentence in str(caught.value)
    assert "secret-" not in str(caught.value)


def test_an_error_that_follows_from_another_one_is_left_out() -> None:
    found = parse_models(changed("aliases/assistant/targets", [{"model": "chat", "weight": -1}]))
    assert found.problems == ("aliases.assistant.targets.0.weight: -1 is too small; use 0 to 1000000",)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("secret-1"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["key", "model", "x"]), inner),
    max_leaves=6,
)
PATHS = ["version", "models", "models/chat", "models/chat/key", "models/next/engines", "models/chat/settings"]
PATHS += ["aliases", "aliases/assistant", "aliases/assistant/targets", "aliases/assistant/targets/0", "models/next/key"]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PATHS), json_values.filter(lambda value: value is not None))
def test_any_value_is_accepted_or_refused_without_the_keys(path: str, value: Any) -> None:
    try:
        sentences = str(parse_models(changed(path, value)).problems)
    except ConfigError as error:
        sentences = str(error)
    assert KEY not in sentences
    assert "secret-1" not in sentences or not path.endswith("key")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engines", {"first": "h:1"}),
        ("engines_dns", "h:1"),
        ("engines_file", "/e"),
        ("key_file", "/k"),
        ("served_model_name", "m"),
        ("api_key_file", "/a"),
    ],
)
def test_the_settings_of_one_model_exclude_the_file(field: str, value: Any) -> None:
    document = {"models_file": "/m", "cache_dir": "/c"}
    assert parse_gateway_config(document).gateway.models_file == "/m"
    with pytest.raises(ConfigError) as caught:
        parse_gateway_config({**document, field: value})
    assert f"models_file cannot be combined with {field}: remove them, and give each model of the file" in str(
        caught.value
    )
