"""The fields of the `/status` document of a gateway with several models, version v1, that the operator uses.

The document's schema is `schemas/gateway-status.v1.json`. As in `status.py`, every list and text has a length limit.
"""

from __future__ import annotations

from pydantic import Field

from rayloom_operator.engines.status import (
    AnswerPart,
    Count,
    EngineStatus,
    GatewayReport,
    Text,
    UnusableKeys,
    checked,
    decoded,
)

_MAX_HASH = 64  # characters
_MAX_PROBLEMS = 64
_MAX_NAMES = 512


class _ModelsFile(AnswerPart):
    hash: str = Field("", max_length=_MAX_HASH)
    refusal: Text = ""
    problems: tuple[Text, ...] = Field((), strict=False, max_length=_MAX_PROBLEMS)


class _GatewayDocument(AnswerPart):
    state: str = Field(max_length=32)
    reason: Text
    in_flight: Count = 0
    uptime_seconds: float = Field(0.0, ge=0)
    models_file: _ModelsFile
    unusable_keys: tuple[UnusableKeys, ...] = Field((), strict=False, max_length=_MAX_NAMES)


def gateway_status(code: int, body: bytes) -> EngineStatus:
    """Parses a response to GET /status of a gateway with several models. The result has no ranks and no model.

    Raises EngineUnavailable unless the response is a valid document of version v1. Gateways of earlier releases send
    another document.
    """
    found = checked(_GatewayDocument, decoded(code, body))
    file = found.models_file
    return EngineStatus(
        state=found.state,
        reason=found.reason,
        startup=(),
        model=None,
        last_token_age_seconds=None,
        ranks=(),
        uptime_seconds=found.uptime_seconds,
        gateway=GatewayReport(
            models_hash=file.hash,
            refusal=file.refusal,
            problems=file.problems,
            unusable_keys=found.unusable_keys,
        ),
    )
