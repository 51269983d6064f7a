"""Headers that several modules use: credentials, request ids, and the model behind an alias."""

from __future__ import annotations

from starlette.datastructures import Headers

MODEL_HEADER = "X-Rayloom-Model"  # header of an answer for an alias: the model that computed the answer
REQUEST_ID = r"[\x21-\x7e]{1,128}"  # form of an X-Request-Id header or a request_id field: visible ASCII


def bearer_token(authorization: str) -> bytes:
    """Returns the bytes of the token in an Authorization header, exactly as sent. Empty if the scheme is not Bearer.

    `authorization` is the header as ASGI frameworks decode it: one character per byte (latin-1).
    """
    kind, _, token = authorization.partition(" ")
    # Only ASCII blanks are stripped, because a byte of a UTF-8 character may look like a Unicode blank.
    return token.strip(" \t").encode("latin-1") if kind.lower() == "bearer" else b""


def api_key(headers: Headers) -> bytes:
    """Returns the key of a request: its bearer token, or the X-Api-Key header that some clients send.

    Empty if the request has neither.
    """
    return bearer_token(headers.get("authorization", "")) or headers.get("x-api-key", "").strip(" \t").encode("latin-1")
