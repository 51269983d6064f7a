"""`spec.restartedAt`: a time. A new time restarts every engine, as `kubectl rollout restart` does for Deployments."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, Field

from rayloom_operator.api.base import rules

# RFC 3339, section 5.6, without leap seconds and lower-case letters, which times of Kubernetes do not have.
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_PATTERN = f"^{_DATE}T{_TIME}$"
_MAX_LENGTH = 40
_IN_WORDS = "use a time such as 2026-11-24T08:00:00Z, as `date -u +%FT%TZ` prints it"


def _is_a_time(text: str) -> str:
    if not re.fullmatch(_PATTERN, text) or not _is_on_the_calendar(text):
        raise ValueError(f"{text!r} is not a time; {_IN_WORDS}")
    return text


def _is_on_the_calendar(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


_RULES = rules((f"self.matches({json.dumps(_PATTERN)})", f"this is not a time; {_IN_WORDS}"))
RestartTime = Annotated[str, AfterValidator(_is_a_time), Field(max_length=_MAX_LENGTH, json_schema_extra=_RULES)]
