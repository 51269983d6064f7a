"""Forms of answers from the real model: every field that requests a form, generated schemas, and hostile schemas.

RAYLOOM_TEST_SCHEMAS is the number of generated schemas, 30 by default.
"""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rt_server import RunningServer, Stream

NUM_SCHEMAS = int(os.environ.get("RAYLOOM_TEST_SCHEMAS", "30"))
AT_ONCE = 10
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AUTH = {"Authorization": "Bearer key-for-tests"}  # the key that conftest.py writes into the server's key file


def _chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Name a person."}], "max_tokens": 80, "seed": 1, **fields}
    answer = server.client.post(f"{server.api_url}/v1/chat/completions", json=body, headers=AUTH)
    return {"status": answer.status_code, **answer.json()}


def _text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": PERSON}},
        {"structured_outputs": {"json": PERSON}},
        {"guided_json": json.dumps(PERSON)},
        {"json_schema": PERSON},
        {"format": PERSON},
    ],
)
def test_every_name_of_a_json_schema_is_enforced(server: RunningServer, fields: dict[str, Any]) -> None:
    answer = _chat(server, **fields)
    assert answer["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(_text(answer)), PERSON)
    assert "warnings" not in answer


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}, "[0-9]{3}-[0-9]{4}"),
        ({"guided_regex": "[a-c]{5}"}, "[a-c]{5}"),
        ({"regex": "[a-c]{5}"}, "[a-c]{5}"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_grammar": 'root ::= "a" [0-3]{4}'}, "a[0-3]{4}"),
        ({"ebnf": 'root ::= "a" [0-3]{4}'}, "a[0-3]{4}"),
        ({"grammar": 'start: "a" /[0-3]{4}/'}, "a[0-3]{4}"),
    ],
)
def test_every_name_of_another_form_is_enforced(server: RunningServer, fields: dict[str, Any], pattern: str) -> None:
    answer = _chat(server, **fields)
    assert re.fullmatch(pattern, _text(answer)), _text(answer)
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_json_without_a_schema_is_an_object(server: RunningServer) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"format": "json"}):
        answer = _chat(server, **fields, temperature=0.0, max_tokens=16)
        if answer["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(_text(answer)), dict)
        else:
            assert _text(answer).startswith("{")


def test_choices_and_streams_have_the_form_too(server: RunningServer) -> None:
    fields = {"structured_outputs": {"json": PERSON}, "n": 3, "logprobs": True, "temperature": 1.0}
    whole = _chat(server, **fields)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    # The log-probabilities are those before the grammar's mask: for the model alone, the first brace was not certain.
    assert whole["choices"][0]["logprobs"]["content"][0]["logprob"] < -0.01
    stream = Stream()
    body = {
        "prompt": "A person in JSON: ",
        "max_tokens": 80,
        "temperature": 1.0,
        "seed": 1,
        # with flexible whitespace, a sampled answer might write blanks until max_tokens
        "structured_outputs": {"json": {**PERSON, "x-guidance": {"whitespace_flexible": False}}},
    }
    stream.run(server.api_url, {**body, "stream": True}, AUTH)
    assert stream.failure is None
    jsonschema.validate(json.loads(stream.text), PERSON)


def test_what_cannot_be_enforced_is_refused_or_warned_of(server: RunningServer) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
    described = {"name": "numbers", "schema": schema, "strict": True}
    refused = _chat(server, response_format={"type": "json_schema", "json_schema": described})
    words = 'Unimplemented keys: ["uniqueItems"]'
    assert refused["status"] == 400
    assert refused["error"]["message"] == f"response_format.json_schema.schema cannot be enforced: {words}"
    assert refused["error"]["param"] == "response_format.json_schema.schema"
    lenient = _chat(server, response_format={"type": "json_schema", "json_schema": {**described, "strict": False}})
    assert lenient["status"] == 200
    assert lenient["warnings"] == [words]
    two = _chat(server, guided_regex="a", guided_choice=["b"])
    assert two["error"]["message"] == "guided_regex and guided_choice each ask for a form of the answer; leave one out"


def test_a_grammar_that_breaks_ends_its_request_alone(server: RunningServer) -> None:
    # The grammar library can parse this grammar, but cannot build it.
    broken = _chat(server, grammar="start: A\nA: /(.*a.{20})/ & /(.*b.{20})/ & ~/(.*c.{20})/")
    assert broken["status"] == 400
    assert broken["error"]["message"].startswith("the form of the answer cannot be kept: fuel exhausted")
    assert _chat(server, guided_choice=["still here"])["choices"][0]["message"]["content"] == "still here"


# The vocabulary of the embedded model has no tokens for some bytes of rarer characters, so the model cannot write these
# characters.
_TEXTS = st.text(st.characters(max_codepoint=0x2FF, exclude_categories=["Cs"]), max_size=4)
_SCALARS = st.one_of(
    st.sampled_from(
        [
            {"type": "string", "maxLength": 8},
            {"type": "string", "pattern": "^[a-z]{2,4}$"},
            {"type": "string", "format": "date"},
            {"type": "boolean"},
            {"type": "null"},
            {"const": {"a": [1, "b"]}},
            {"type": "number", "minimum": -2, "maximum": 7.5},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        ]
    ),
    st.lists(st.one_of(st.integers(-9, 99), _TEXTS, st.booleans()), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.tuples(st.integers(2, 9), st.integers(10, 99)).map(
        lambda pair: {"type": "integer", "multipleOf": pair[0], "minimum": 0, "maximum": pair[1]}
    ),
)


def _containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.text('abcdefg_ é"', min_size=1, max_size=5)
    objects = st.tuples(st.dictionaries(names, inner, max_size=3), st.booleans()).map(
        lambda parts: {
            "type": "object",
            "properties": parts[0],
            "required": list(parts[0]) if parts[1] else [],
            "additionalProperties": False,
        }
    )
    arrays = st.tuples(inner, st.integers(0, 2)).map(
        lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1], "maxItems": 2}
    )
    return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}))


FORMATS = jsonschema.FormatChecker()


@FORMATS.checks("date", ValueError)
def _is_date(value: object) -> bool:
    """Checks a date of RFC 3339.

    Python has no year 0000. The year 2000 replaces it, because both are leap years.
    """
    return not isinstance(value, str) or bool(date.fromisoformat(re.sub("^0000", "2000", value)))


SCHEMAS = st.recursive(_SCALARS, _containers, max_leaves=5)


def _answer_in(server: RunningServer, seed: int, schema: dict[str, Any]) -> tuple[str, str]:
    body = {"prompt": "JSON: ", "max_tokens": 48, "temperature": 1.0, "seed": seed, "guided_json": schema}
    answer = server.client.post(f"{server.api_url}/v1/completions", json=body, headers=AUTH)
    assert answer.status_code == 200, f"{answer.text} for {json.dumps(schema)}"
    choice = answer.json()["choices"][0]
    return choice["text"], choice["finish_reason"]


@settings(
    max_examples=max(1, NUM_SCHEMAS // AT_ONCE),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schemas=st.lists(SCHEMAS, min_size=AT_ONCE, max_size=AT_ONCE), seed=st.integers(0, 1000))
def test_answers_have_the_form_of_any_schema(server: RunningServer, schemas: list[dict[str, Any]], seed: int) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda schema: _answer_in(server, seed, schema), schemas))
    for schema, (text, finish_reason) in zip(schemas, answers, strict=True):
        if finish_reason == "stop":
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
        else:
            assert finish_reason == "length"
            assert len(text) >= 48 // 2, "an answer that max_tokens cut is long"


HOSTILE: list[dict[str, Any]] = [
    {"guided_json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}},
    {"guided_json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(400)}}},
    {"guided_json": {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}}},
    {"guided_regex": "(a+)+" * 50 + "$"},
    {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"guided_grammar": 'start: s\ns: s s s | s s | "a" | ""'},
    {"guided_grammar": "root ::= " + '"a" | ' * 9000 + '"b"'},
]


def test_hostile_forms_leave_other_streams_their_pace(server: RunningServer) -> None:
    stream = Stream()
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "temperature": 0.0, "stream": True}
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream.run, server.api_url, body, AUTH)
        statuses = set()
        while not running.done():
            for hostile in HOSTILE:
                statuses.add(_chat(server, **hostile, max_tokens=4)["status"])
        running.result()
    assert stream.failure is None
    assert statuses <= {200, 400}
    gaps = [later - earlier for earlier, later in zip(stream.times, stream.times[1:], strict=False)]
    assert sorted(gaps)[-3] < 1.0, "two may be hiccups of a busy machine; there are more hostile forms"
    assert time.monotonic() > stream.times[-1]
