"""RequestName: the name that a client gives its request. By this name, a repeat of the request is recognised."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable
from dataclasses import dataclass

from starlette.requests import Request

from rayloom_engine.common.json_words import shown
from rayloom_engine.front.http.errors import ApiError

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_CHARS = 255
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestName:
    """The name of a request, among the requests of one API key at one endpoint."""

    text: str
    owner: str  # the owner of the request's API key, as the scheduler names it; empty if the server has no keys
    path: str
    is_key: bool  # True: an Idempotency-Key; False: an X-Request-Id, which several requests may share

    def entry_key(self, digest: bytes) -> Hashable:
        """Returns the key of the kept answer. `digest`: hash of the body.

        An Idempotency-Key names one request, so the result does not depend on the body. Several requests may have the
        same X-Request-Id, so the result then depends on the body.
        """
        return (self, b"" if self.is_key else digest)

    @property
    def seed(self) -> int:
        """The seed, in [0, 2**63), for a request that gives no seed. Every server computes the same seed."""
        return int.from_bytes(self._hash(8, b"rayloom-seed")) >> 1

    @property
    def request_id(self) -> str:
        """The id for a request that has no other id: 32 hexadecimal digits. Every server computes the same id."""
        return self._hash(16, b"rayloom-id").hex()

    def _hash(self, num_bytes: int, purpose: bytes) -> bytes:
        # None of the parts can contain a line break.
        parts = "\n".join((self.owner, self.path, self.text))
        return hashlib.blake2b(parts.encode(), digest_size=num_bytes, person=purpose).digest()


def request_name(request: Request) -> RequestName | None:
    """Returns the client's Idempotency-Key, else its X-Request-Id; None if the request has neither.

    Raises ApiError 400 for an Idempotency-Key that cannot be used.
    """
    owner: str = request.state.owner
    path: str = request.scope["path"]
    given = request.headers.get(IDEMPOTENCY_KEY)
    if given is not None:
        return RequestName(text=checked_key(given), owner=owner, path=path, is_key=True)
    http_id: str = request.state.request_id
    if request.headers.get("x-request-id") != http_id:
        return None
    return RequestName(text=http_id, owner=owner, path=path, is_key=False)


def checked_key(given: str) -> str:
    """Returns the key in an Idempotency-Key header, without the quotes of a structured field. Raises ApiError 400."""
    key = given.strip(" \t")
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not _KEY.fullmatch(key):
        raise ApiError(
            400,
            f"the header {IDEMPOTENCY_KEY} is {shown(given)}; it must have 1 to {MAX_KEY_CHARS} visible ASCII "
            "characters, such as a random UUID",
            code="invalid_idempotency_key",
        )
    return key
