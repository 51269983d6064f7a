"""The OpenAPI document names every endpoint, and its schemas describe the server's real answers. The page /docs loads
no other file.

The core is a fake one with bytes as tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from rayloom_engine.front.routes import ROUTES
from rt_fake_core import say
from rt_front import MODEL, FrontUnderTest, events, running_front

HI = [{"role": "user", "content": "Hi"}]
SCHEMAS = "#/components/schemas/"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        front.do(lambda: setattr(front.core, "script", say("one two")))
        yield front


@pytest.fixture(scope="module")
def document(front: FrontUnderTest) -> dict[str, Any]:
    response = front.http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    return response.json()


def references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from (value for key, value in schema.items() if key == "$ref")
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from references(item)


def closed(schema: Any) -> Any:
    """A copy of `schema` in which no object may have an undeclared key."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: closed(value) for key, value in schema.items()}
    if "properties" in schema:
        changed.setdefault("additionalProperties", False)
    return changed


def check(document: dict[str, Any], name: str, answer: Any) -> None:
    """Fails unless `answer` has all keys of the schema `name` with the declared types, and no other key."""
    schema = {**closed(copy.deepcopy(document)), "$ref": SCHEMAS + name}
    jsonschema.Draft202012Validator(schema).validate(answer)


def test_every_endpoint_is_described(document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    assert described == {(route.method, route.path.replace(":path", "")) for route in ROUTES}
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["summary"] and operation["tags"]
            assert {"200", "400", "500", "503"} <= set(operation["responses"])
            assert "422" not in operation["responses"]


def test_every_reference_has_a_schema(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert {SCHEMAS + "ChatRequest", SCHEMAS + "ChatCompletionChunk", SCHEMAS + "ErrorAnswer"} <= found
    assert {name for name in found if name.removeprefix(SCHEMAS) not in document["components"]["schemas"]} == set()


def test_examples_are_answered(front: FrontUnderTest, document: dict[str, Any]) -> None:
    count = 0
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for name, example in body.get("examples", {}).items():
            response = front.http.post(path, json=example["value"])
            assert response.status_code == 200, (path, name, response.text)
            count += 1
    assert count >= 6


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}])
def test_chats_have_the_described_form(front: FrontUnderTest, document: dict[str, Any], fields: dict[str, Any]) -> None:
    check(document, "ChatCompletion", front.chat(**fields, n=2, prompt_logprobs=1).json())
    with front.chat_stream(**fields, stream_options={"include_usage": True}) as stream:
        chunks = [event for event in stream if isinstance(event, dict)]
    assert len(chunks) >= 3
    for chunk in chunks:
        check(document, "ChatCompletionChunk", chunk)


@pytest.mark.parametrize(
    "fields", [{}, {"include": ["message.output_text.logprobs"], "enable_response_messages": True}]
)
def test_responses_have_the_described_form(
    front: FrontUnderTest, document: dict[str, Any], fields: dict[str, Any]
) -> None:
    check(document, "ResponseAnswer", front.http.post("/v1/responses", json={"input": "Hi", **fields}).json())


def test_messages_have_the_described_form(front: FrontUnderTest, document: dict[str, Any]) -> None:
    body = {"messages": HI, "max_tokens": 30}
    message = front.http.post("/v1/messages", json=body).json()
    for block in message["content"]:
        assert set(block) == {"type", "text", "citations"}
    check(document, "MessageAnswer", {**message, "content": [{"type": "text"}]})
    check(document, "CountTokensAnswer", front.http.post("/v1/messages/count_tokens", json={"messages": HI}).json())
    check(document, "AnthropicErrorAnswer", front.http.post("/v1/messages", json={}).json())


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2, "echo": True, "return_token_ids": True}])
def test_completions_have_the_described_form(
    front: FrontUnderTest, document: dict[str, Any], fields: dict[str, Any]
) -> None:
    check(document, "TextCompletion", front.complete(**fields, n=2).json())
    body = {"model": MODEL, "prompt": "Hi", "stream": True, **fields}
    with front.http.stream("POST", "/v1/completions", json=body) as response:
        chunks = [event for event in events(response) if isinstance(event, dict)]
    assert chunks
    for chunk in chunks:
        check(document, "TextCompletionChunk", chunk)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/models", None, "ModelList"),
        (f"/v1/models/{MODEL}", None, "ModelCard"),
        ("/tokenize", {"prompt": "Hi", "return_token_strs": True}, "TokenizeAnswer"),
        ("/detokenize", {"tokens": [72, 105]}, "DetokenizeAnswer"),
        ("/health", None, "HealthAnswer"),
        ("/ready", None, "HealthAnswer"),
        ("/version", None, "VersionAnswer"),
    ],
)
def test_small_answers_have_the_described_form(
    front: FrontUnderTest, document: dict[str, Any], path: str, body: Any, name: str
) -> None:
    response = front.http.get(path) if body is None else front.http.post(path, json=body)
    assert response.status_code == 200
    check(document, name, response.json())


def test_errors_have_the_described_form(front: FrontUnderTest, document: dict[str, Any]) -> None:
    for response in (front.chat(n=0), front.http.get("/v1/models/other"), front.http.get("/none")):
        assert response.status_code >= 400
        check(document, "ErrorAnswer", response.json())


def test_the_page_shows_every_endpoint_and_loads_nothing(front: FrontUnderTest, document: dict[str, Any]) -> None:
    response = front.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert {path for path in document["paths"] if f"<code>{path}</code>" not in response.text} == set()
    assert not re.search(r"(src|href)=['\"]?(https?:)?//|<script|<link|@import|url\(", response.text)


def test_the_document_is_the_same_for_every_request(front: FrontUnderTest, document: dict[str, Any]) -> None:
    assert front.http.get("/openapi.json").json() == document
