"""The operator's log: text for people, or JSON with a line each. A line about a service carries its key."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

# The service that a task works for, as namespace/name. Tasks that are made meanwhile inherit it.
SERVICE: ContextVar[str] = ContextVar("service", default="")


def set_up(level: str, form: str) -> None:
    """Everything that is logged from here on goes to stderr in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _Json() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf says of each event that it was handled, aiohttp of each look at /healthz.
    for name in ("kopf", "aiohttp.access"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        about = getattr(record, "k8s_ref", {})  # kopf's
        service = SERVICE.get() or "/".join(about[part] for part in ("namespace", "name") if part in about)
        if service:
            said["service"] = service
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)
