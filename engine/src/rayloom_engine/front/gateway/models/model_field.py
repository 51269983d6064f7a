"""RoutedFields: the fields of a body that decide which model answers, found without decoding the other fields."""

from __future__ import annotations

from typing import Any

import msgspec

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.front.http.body import parse_object


class RoutedFields(msgspec.Struct, frozen=True):
    """The part of a body that a gateway reads. The model's own handler reads the whole body."""

    model: str | None = None
    user: str | None = None  # the end user: `user`, `metadata.user_id` or `safety_identifier`, the first that is given


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _RoutedBody(msgspec.Struct):
    model: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: _Metadata | None = None


_decoder = msgspec.json.Decoder(_RoutedBody)


def routed_fields(body: bytes) -> RoutedFields:
    """Returns the fields of a body that decide which model answers.

    For a body that is not JSON, or a model that is no string, raises the same ApiError or RequestError as the model's
    own handler. The other fields are not decoded: a body of 1 MB takes about 1 ms.
    """
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _whole_fields(parse_object(body))
    metadata = None if found.metadata is None else found.metadata.user_id
    return RoutedFields(found.model, found.user or metadata or found.safety_identifier)


def _whole_fields(document: dict[str, Any]) -> RoutedFields:
    """Returns the same fields of a decoded body, in which fields may have unexpected types."""
    model = document.get("model")
    if model is not None and not isinstance(model, str):
        raise RequestError(f"model must be a string, given {shown(model)}", "model")
    metadata = document.get("metadata")
    users = (
        document.get("user"),
        metadata.get("user_id") if isinstance(metadata, dict) else None,
        document.get("safety_identifier"),
    )
    return RoutedFields(model, next((user for user in users if user and isinstance(user, str)), None))
