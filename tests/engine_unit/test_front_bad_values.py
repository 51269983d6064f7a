"""41 values in the fields of every endpoint: each gets an answer or a refusal in JSON's words, never a 5xx.

The tests call the application directly in the front's loop. Thousands of connections would take longer and test nothing
more. The fields include known fields that are not implemented or have no effect, and unknown names.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import rt_openai_schema
from rayloom_engine.front.app import api_app
from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.openai.fields.other_apis import NOT_IMPLEMENTED, WITHOUT_EFFECT
from rayloom_engine.front.openai.fields.wire import ENDPOINTS, StreamOptions
from rt_fake_core import say
from rt_front import MODEL, FrontUnderTest, running_front

VALUES = (
    *("null", "true", "false", "0", "1", "-1", "2", "4.0", "4.5", "-0.0", "1e2", "1e-9", "1e300", "-1e300", "1e400"),
    *("2147483647", "2147483648", "-2147483649", "9223372036854775807", "-9223372036854775809", "1" + "0" * 400),
    *('""', '"4"', '"x"', '"true"', r'"\u0000"', r'"\ud83d\ude00"', '"' + "y" * 20_000 + '"'),
    *("[]", "[null]", "[1,2]", "[-1]", '["a","b"]', "[[]]", "[[1.5]]", "[" * 20 + "]" * 20, "[" + "0," * 3000 + "0]"),
    *("{}", '{"a":1}', '{"1":null}', '[{"role":"user","content":"Hi"}]'),
)
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72, 105]},
}
# One function checks all fields of WITHOUT_EFFECT, and another all fields of NOT_IMPLEMENTED. So each of these fields
# gets only every eighth value, and each value still goes to several fields.
SHARE = 8
PYTHON = re.compile(r"\b(?:False|True|None|Traceback|dict|tuple|str|pydantic|msgspec)\b|<class")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as running:
        running.do(lambda: setattr(running.core, "script", say("ok")))
        yield running


def bodies(path: str) -> Iterator[tuple[str, bytes]]:
    """The field and the body of each request: values are in every field and in nested fields."""
    values = dict.fromkeys([*ENDPOINTS[path].model_fields, "no_such_field"], VALUES)
    if path.startswith("/v1/"):
        for table in (WITHOUT_EFFECT, NOT_IMPLEMENTED):
            for number, name in enumerate(table):
                values.setdefault(name, VALUES[number % SHARE :: SHARE])
    for name, of_name in values.items():
        rest = msgspec.json.encode({key: value for key, value in BASE[path].items() if key != name})[1:]
        for value in of_name:
            comma = b"" if rest == b"}" else b","
            yield name, b'{"' + name.encode() + b'":' + value.encode() + comma + rest
    if path.startswith("/v1/"):
        for name in (*StreamOptions.model_fields, "other"):
            for value in VALUES:
                rest = msgspec.json.encode({**BASE[path], "stream": True})[1:]
                yield name, b'{"stream_options":{"' + name.encode() + b'":' + value.encode() + b"}," + rest
    if path == "/v1/chat/completions":
        for name in ("role", "content", "name", "tool_calls", "function_call", "refusal", "other"):
            for value in VALUES:
                message = b'{"content":"Hi","role":"user","' + name.encode() + b'":' + value.encode() + b"}"
                yield name, b'{"messages":[' + message + b"]}"


async def ask(app: Any, path: str, body: bytes) -> tuple[int, str, bytes]:
    """Status, content type and body of the answer."""
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop() if incoming else await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    kind = dict(sent[0]["headers"])[b"content-type"].decode()
    return sent[0]["status"], kind, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize("path", BASE)
def test_no_value_is_a_fault_of_ours(front: FrontUnderTest, path: str) -> None:
    app = api_app(front.service, ApiKeys())
    statuses: Counter[int] = Counter()

    async def all_of_them() -> None:
        for name, body in bodies(path):
            status, kind, answer = await ask(app, path, body)
            statuses[status] += 1
            where = f"{name} in {body[:200]!r}: {status} {answer[:300]!r}"
            assert status in (200, 400, 404), where
            if status == 200:
                assert kind.startswith("text/event-stream") or json.loads(answer), where
                continue
            document = json.loads(answer)
            rt_openai_schema.check("ErrorResponse", document)
            message = document["error"]["message"].partition("cannot be enforced: ")[0]  # the grammar library's words
            assert not PYTHON.search(message), where
            assert "'" not in message.replace("model's", "").replace("request's", ""), where
            assert len(message) < 400, where

    assert len(VALUES) == 41
    asyncio.run_coroutine_threadsafe(all_of_them(), front._loop).result(200.0)
    print(path, dict(statuses))
    assert statuses[200] > 0
    assert statuses[400] > 0
    assert front.do(lambda: front.service.lifecycle.num_in_flight) == 0
    assert front.chat().json()["model"] == MODEL
