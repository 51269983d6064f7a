"""GatewayStatus: the `/status` document of a gateway with several models, for the operator and for people.

The document's JSON schema is `schemas/gateway-status.v1.json`, written by `make schemas`.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rayloom_engine.status import State

# Limits of the minimal document, which the operator reads with a limit of 64 KiB.
MAX_PROBLEMS = 8
MAX_NAMES = 32
_MAX_TEXT = 600  # characters
_HASH_CHARS = 16


class _GatewayPart(BaseModel):
    model_config = ConfigDict(frozen=True)


class ModelsFileStatus(_GatewayPart):
    """The models file that the gateway serves by, and what is wrong with it or with a newer one."""

    hash: str = Field(
        "",
        description=f"The first {_HASH_CHARS} hexadecimal digits of the SHA-256 of the file that was read and applied.",
    )
    refusal: str = Field(
        "", description="Why the present content of the file cannot be used, so that an earlier one applies. Or empty."
    )
    problems: list[str] = Field(
        [],
        description="A sentence for each mistake in the applied file. Entries with mistakes are not served. At most "
        f"{MAX_PROBLEMS}.",
    )


class UnusableKeys(_GatewayPart):
    """A name whose file of API keys cannot be used."""

    name: str = Field(description="The model or alias.")
    problem: str = Field(description="Why the file cannot be used.")
    accepted: int = Field(description="Keys that were read before and stay in force. 0: every key is refused.")


class GatewayStatus(_GatewayPart):
    """The state of a gateway with several models."""

    version: Literal["v1"] = Field(description="Version of this document.")
    state: State = Field(description="State of the gateway: it serves as long as one of its models does.")
    reason: str = Field(description="Cause of the state, as a sentence.")
    in_flight: int = Field(description="Requests that are not yet answered in full.")
    uptime_seconds: float = Field(description="Seconds since the start of this process.")
    models_file: ModelsFileStatus = Field(description="The models file that the gateway has read.")
    unusable_keys: list[UnusableKeys] = Field(
        [], description=f"Names whose file of API keys cannot be used, in alphabetical order. At most {MAX_NAMES}."
    )
    models: dict[str, Any] = Field(
        {},
        description="The `/status` document of each model. Left out of the minimal document, which a request prefers "
        "by `Prefer: return=minimal`: it would be too long.",
    )


def content_hash(content: bytes) -> str:
    """Returns the hash by which a models file is recognised."""
    return hashlib.sha256(content).hexdigest()[:_HASH_CHARS]


def shortened(sentence: str) -> str:
    """Returns a sentence of the document, cut to the length that the document allows."""
    return sentence if len(sentence) <= _MAX_TEXT else f"{sentence[: _MAX_TEXT - 3]}..."
