"""The operator's log: lines of text, or one JSON object per line. Lines about a service have its namespace and name."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

# The service that the current task reconciles, as namespace/name. Tasks that this task creates inherit the value.
SERVICE: ContextVar[str] = ContextVar("service", default="")


def set_up(level: str, form: str) -> None:
    """Sends the log to stderr. `form`: `text` or `json`."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _Json() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # At levels below warning, kopf logs each handled event, and aiohttp logs each request for /healthz.
    for name in ("kopf", "aiohttp.access"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    # The startup handler of a standby returns only once the standby leads. If a standby is stopped before that, kopf
    # warns twice about this handler. So these two loggers log errors only.
    for name in ("kopf.activities.startup", "kopf._core.reactor.running"):
        logging.getLogger(name).setLevel(logging.ERROR)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        reference = getattr(record, "k8s_ref", {})  # kopf sets this attribute
        service = SERVICE.get() or "/".join(reference[part] for part in ("namespace", "name") if part in reference)
        if service:
            line["service"] = service
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
