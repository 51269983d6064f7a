"""Request headers that the API port and the admin port read: credentials and request ids."""

from __future__ import annotations

from starlette.datastructures import Headers

REQUEST_ID = r"[\x21-\x7e]{1,128}"  # of an X-Request-Id header or a request_id field: visible ASCII


def bearer_token(authorization: str) -> bytes:
    """The token's bytes in an Authorization header, as they were sent; empty for another scheme.

    `authorization` is a header as ASGI frameworks give it: one character per byte (latin-1).
    """
    kind, _, token = authorization.partition(" ")
    # Only ASCII blanks are stripped: a byte of a UTF-8 character may look like one of Unicode's.
    return token.strip(" \t").encode("latin-1") if kind.lower() == "bearer" else b""


def api_key(headers: Headers) -> bytes:
    """The key of a request, as bearer token or, as some clients send it, in X-Api-Key; empty without one."""
    return bearer_token(headers.get("authorization", "")) or headers.get("x-api-key", "").strip(" \t").encode("latin-1")
