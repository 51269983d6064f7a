"""The Kubernetes Events about an LLMService, listed at the end of `kubectl describe`. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rayloom_operator.api.status import FAULTS, Condition, Reason, Status
from rayloom_operator.decide.scaling.inputs import SCALER
from rayloom_operator.names import FIELD_MANAGER, Manifest
from rayloom_operator.texts import head_bytes

_MAX_NOTE = 1024  # bytes; the API server refuses a longer note


def events(service: Manifest, status: Status, now: datetime) -> tuple[Manifest, ...]:
    """Returns Events for changed conditions, and for a change of `replicas` by the scaler.

    A condition has changed if its reason or message in `status` differs from that in the document `service`.

    An Event's name is derived from its content and the condition's transition time, so that a retry creates no second
    Event.
    """
    found = condition_events(service, status.conditions, now)
    if scaling := _scaling_event(service, status, now):
        return (*found, scaling)
    return found


def condition_events(stored: Manifest, conditions: Sequence[Condition], now: datetime) -> tuple[Manifest, ...]:
    """Returns Events for the conditions that differ from those in `stored`, the document of a service or of an
    LLMGateway."""
    before = {old["type"]: old for old in stored.get("status", {}).get("conditions", ())}
    found = {}
    for condition in conditions:
        old = before.get(condition.type, {})
        is_same = (old.get("reason"), old.get("message")) == (condition.reason, condition.message)
        if not is_same and _deserves_event(condition, old):
            since = condition.last_transition_time
            found[condition.reason] = _event(stored, condition.reason, condition.message, since, now)
    return tuple(found.values())


def _scaling_event(service: Manifest, status: Status, now: datetime) -> Manifest | None:
    """Returns the Event about a new number of engines that the scaler has written; None if there is none."""
    found = status.autoscaling
    before = service.get("status", {}).get("autoscaling", {})
    if found is None or found.writer != SCALER or found.last_scale_time == before.get("lastScaleTime"):
        return None
    return _event(service, found.reason, found.message, f"{found.last_scale_time}/{found.desired_replicas}", now)


def _deserves_event(condition: Condition, old: Mapping[str, Any]) -> bool:
    if condition.type == "Progressing":
        return bool(old) and old.get("reason") != condition.reason
    is_repaired = condition.reason is Reason.HEALTHY and old.get("status") == "True"
    return condition.reason in FAULTS or condition.reason is Reason.SERVING or is_repaired


def _event(service: Manifest, reason: str, message: str, since: str, now: datetime) -> Manifest:
    meta = service["metadata"]
    content = f"{meta['uid']}/{reason}/{message}/{since}"
    name = f"{meta['name']}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    identity = {key: service[key] for key in ("apiVersion", "kind")}
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": meta["namespace"]},
        "eventTime": now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": f"rayloom.dev/{FIELD_MANAGER}",
        "reportingInstance": FIELD_MANAGER,
        "type": "Warning" if reason in FAULTS else "Normal",
        "reason": str(reason),
        "action": "Reconcile",
        "regarding": identity | {key: meta[key] for key in ("namespace", "name", "uid")},
        "note": head_bytes(message, _MAX_NOTE),
    }
