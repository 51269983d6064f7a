"""Kubernetes Events about an LLMService: what `kubectl describe` shows at its end."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from rayloom_operator.api.status import FAULTS, Condition, Reason, Status
from rayloom_operator.names import FIELD_MANAGER, Manifest
from rayloom_operator.texts import head_bytes

_MAX_NOTE = 1024  # bytes that the API server takes


def events(service: Manifest, status: Status, clock: datetime) -> tuple[Manifest, ...]:
    """Events for what `status` says anew, compared with the status in the document `service`.

    An event's name follows from what it says and since when, so that saying it again makes no second one.
    """
    before = {old["type"]: old for old in service.get("status", {}).get("conditions", ())}
    found = {}
    for condition in status.conditions:
        old = before.get(condition.type, {})
        is_healed = condition.reason is Reason.HEALTHY and old.get("status") == "True"
        is_news = condition.reason in FAULTS or condition.reason is Reason.SERVING or is_healed
        if condition.type == "Progressing":
            is_news = bool(old) and old.get("reason") != condition.reason
        if is_news and (old.get("reason"), old.get("message")) != (condition.reason, condition.message):
            found[condition.reason] = _event(service, condition, clock)
    return tuple(found.values())


def _event(service: Manifest, condition: Condition, clock: datetime) -> Manifest:
    meta = service["metadata"]
    said = f"{meta['uid']}/{condition.reason}/{condition.message}/{condition.last_transition_time}"
    name = f"{meta['name']}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    about = {key: service[key] for key in ("apiVersion", "kind")}
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": meta["namespace"]},
        "eventTime": clock.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": f"rayloom.dev/{FIELD_MANAGER}",
        "reportingInstance": FIELD_MANAGER,
        "type": "Warning" if condition.reason in FAULTS else "Normal",
        "reason": str(condition.reason),
        "action": "Reconcile",
        "regarding": about | {key: meta[key] for key in ("namespace", "name", "uid")},
        "note": head_bytes(condition.message, _MAX_NOTE),
    }
