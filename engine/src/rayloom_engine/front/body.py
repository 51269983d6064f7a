"""Request bodies: read with a size limit, checked for UTF-8, nesting and JSON, with a sentence for each fault."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from rayloom_engine.front.errors import ApiError, ClientGone

MAX_DEPTH = 64  # no field of the API nests deeper than a few levels
THREAD_ABOVE_BYTES = 256 * 1024  # larger bodies are parsed in a thread, so that other streams do not wait

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a request's body. Raises ApiError (400, 413) or ClientGone."""
    body = await read_body(request, max_bytes)
    if len(body) > THREAD_ABOVE_BYTES:
        return await asyncio.to_thread(parse_object, body)
    return parse_object(body)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be longer than `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError 400 with what is wrong and where."""
    if not body.strip():
        raise ApiError(400, "the body is empty; send a JSON object")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: bad byte at offset {error.start}") from error
    if is_deeper_than(body, MAX_DEPTH):
        raise ApiError(400, f"the body is nested too deeply; at most {MAX_DEPTH} levels are allowed")
    try:
        document = msgspec.json.decode(text)
    except UnicodeDecodeError as error:  # an escape for half of a surrogate pair
        raise ApiError(400, "the body has an escape that is not a character") from error
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ApiError(400, f"the body must be a JSON object, it is {_KINDS.get(type(document), 'something else')}")
    return document


def is_deeper_than(body: bytes, max_depth: int) -> bool:
    """Whether brackets outside strings nest deeper than `max_depth`. Cheap for bodies with few brackets."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False
    depth = 0
    for byte in _STRING.sub(b"", body).translate(None, _NO_BRACKETS):
        if byte in b"[{":
            depth += 1
            if depth > max_depth:
                return True
        else:
            depth -= 1
    return False


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes, the most this server takes; send less")


_KINDS: dict[type, str] = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
