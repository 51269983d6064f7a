"""Reads request bodies within a size limit, and checks type, UTF-8, shape and JSON. Each fault has its own message."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from rayloom_engine.common.json_words import shown
from rayloom_engine.front.http.body_budget import BodyBudget, HeldBody
from rayloom_engine.front.http.errors import ApiError, ClientGone
from rayloom_engine.front.http.turns import Turns

MAX_DEPTH = 64  # the API's own fields nest only a few levels deep
# Limits on the parts of a body. A body that reaches all limits takes 50 ms to decode; 8 MiB of brackets would take 1 s.
MAX_FIELDS = 1024
MAX_CONTAINERS = 2**16
MAX_STRINGS = 2**16  # number of strings, keys included
MAX_VALUES = 2**20 + 2**17  # items: the token ids of the longest /detokenize request, with some margin
THREAD_ABOVE_BYTES = 256 * 1024  # bytes; larger bodies are parsed in a thread, so that streams do not stall
MAX_BODY_BYTES_AT_ONCE = 128 * 1024 * 1024  # bytes of all requests' bodies together, see BodyBudget

Parsed = TypeVar("Parsed")

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE_PROBLEM = re.compile(r"surrogate pair \(byte (\d+)\)")  # in a message of msgspec
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
# the first half of a pair, before a character that does not begin the second half
_LAST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u])")
_MAX_TAIL_BYTES = 12  # such a half and fewer than 6 bytes after it
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Returns the JSON object in a request's body. Raises ApiError (400, 413, 415, 503) or ClientGone.

    The budget counts the body until the body is decoded, so also while the body waits for the parser.
    """
    check_content_type(request.headers.get("content-type"))
    tenant: str = request.state.tenant
    with _BUDGET.share(tenant, 4 * max_bytes) as share:
        body = await read_body(request, max_bytes, share.take)
        return await parsed(body, tenant, parse_object)


async def parsed(body: bytes, tenant: str, parse: Callable[[bytes], Parsed]) -> Parsed:
    """Returns the result of `parse`. A large body is parsed in a thread, in the tenant's turn."""
    if len(body) <= THREAD_ABOVE_BYTES:
        return parse(body)
    # Only one large body is parsed at a time: two threads would share the interpreter's lock.
    async with _PARSER_TURNS.turn(tenant):
        return await asyncio.to_thread(parse, body)


async def hold_body(request: Request, max_bytes: int) -> HeldBody:
    """Returns a request's undecoded body, which counts in the budget until it is taken or dropped.

    Raises the same errors as `read_json`, except those for faults of the JSON.
    """
    check_content_type(request.headers.get("content-type"))
    share = _BUDGET.share(request.state.tenant, 4 * max_bytes)
    try:
        return HeldBody(await read_body(request, max_bytes, share.take), share)
    except BaseException:
        share.give_back()
        raise


def check_content_type(given: str | None) -> None:
    """Raises ApiError 415 for anything but JSON.

    Without this check, any web page could send requests: browsers send some other types without a CORS preflight.
    """
    kind = (given or "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.count("/") == 1 and kind.endswith("+json")):
        return
    raise ApiError(
        415,
        f"the Content-Type is {shown(given) if given else 'missing'}; this path takes JSON, so send the header "
        "`Content-Type: application/json` "
        "(curl: add -H 'Content-Type: application/json')",
        code="unsupported_media_type",
    )


async def read_body(request: Request, max_bytes: int, take: Callable[[int], None]) -> bytes:
    """Returns the whole body. Calls `take` with the size of each part; `take` may raise to refuse a part.

    Raises ApiError 413 as soon as it is clear that the body is longer than `max_bytes`.
    """
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
            take(len(chunk))
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in `body`. Raises ApiError 400 that says what is wrong and where."""
    if not body.strip():
        raise ApiError(400, "the body is empty; send a JSON object")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: bad byte at offset {error.start}") from error
    check_shape(body)
    try:
        document = msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise ApiError(400, _decoding_problem(body, str(error))) from error
    if not isinstance(document, dict):
        raise ApiError(400, f"the body must be a JSON object, it is {_KINDS.get(type(document), 'something else')}")
    if len(document) > MAX_FIELDS:
        raise ApiError(400, f"the body has {len(document)} fields; at most {MAX_FIELDS} are allowed")
    return document


def _decoding_problem(body: bytes, problem: str) -> str:
    """Returns the message about a body that msgspec refuses. `problem`: msgspec's words."""
    end = None
    if found := _SURROGATE_PROBLEM.search(problem):
        end = int(found[1])
        # If another escape follows instead of the second half, msgspec names the place behind that escape.
        if not _HALF.fullmatch(body, end - 6, end):
            end -= 6
    elif "truncated" in problem and (half := _LAST_HALF.search(body, max(0, len(body) - _MAX_TAIL_BYTES))):
        # msgspec looks for the second half in the next 6 bytes, and calls a body that ends before them truncated.
        num_backslashes = half.start() + 1 - len(body[: half.start() + 1].rstrip(b"\\"))
        end = half.end() if num_backslashes % 2 else None
    if end is None:
        return f"the body is not JSON: {problem}"
    return (
        f"the body has half of a surrogate pair in the escape before byte {end}, which is not a character; send both "
        r'halves, as in "\ud83d\ude00", or leave the escape out'
    )


def check_shape(body: bytes, max_depth: int = MAX_DEPTH) -> None:
    """Raises ApiError 400 if the JSON nests too deeply or has too many parts. Runs before the JSON is decoded.

    Decoding holds the interpreter's lock from start to end, which delays every stream. This function works string by
    string, so other threads can run in between.
    """
    is_flat = body.count(b"[") + body.count(b"{") <= max_depth  # brackets in strings count too
    if is_flat and body.count(b",") <= MAX_VALUES and body.count(b'"') <= MAX_STRINGS:
        return
    containers = strings = values = depth = position = 0
    while position < len(body):
        quote = body.find(b'"', position)
        end = len(body) if quote < 0 else quote
        between = body[position:end]
        values += between.count(b",")
        containers += between.count(b"[") + between.count(b"{")
        if containers > MAX_CONTAINERS or strings > MAX_STRINGS or values > MAX_VALUES:
            raise ApiError(
                400,
                f"the body has too many parts; at most {MAX_CONTAINERS} objects and lists, {MAX_STRINGS} strings and "
                f"{MAX_VALUES} values are allowed",
            )
        for byte in between.translate(None, _NO_BRACKETS):
            depth += 1 if byte in b"[{" else -1
            if depth > max_depth:
                raise ApiError(400, f"the body is nested too deeply; at most {max_depth} levels are allowed")
        if quote < 0:
            return
        strings += 1
        string = _STRING.match(body, quote)
        assert string is not None  # the regex matches from any quote, even without a closing one
        position = string.end()


_PARSER_TURNS = Turns()
_BUDGET = BodyBudget(MAX_BODY_BYTES_AT_ONCE)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes, the most this server takes; send less")


_KINDS: dict[type, str] = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
