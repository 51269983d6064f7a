"""The document of `/ui/status`: the part of the engine's status that the page's strip of recoveries shows. Pure.

Clients of the API port may read this document. It names no hosts, nodes or process ids, unlike the admin port's
`/status`.
"""

from __future__ import annotations

from typing import Any

from rayloom_engine.status import EngineStatus

SHOWN = 5  # the most recoveries in the document


def strip(status: EngineStatus) -> dict[str, Any]:
    """Returns the strip's document; the newest recovery comes first."""
    return {
        "state": status.state,
        "epoch": status.epoch,
        "num_ranks": len(status.ranks),
        "requests": {
            "running": status.requests.running,
            "waiting": status.requests.waiting,
            "failed": status.requests.failed,
        },
        "recoveries": [
            {
                "process": recovery.process,
                "at": recovery.at,
                "seconds": recovery.seconds,
                "replayed_requests": recovery.replayed_requests,
            }
            for recovery in reversed(status.recoveries[-SHOWN:])
        ],
    }
