"""The progress of the gateways' Deployments, as the Deployment controller reports it in their status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.observed import DeploymentProgress
from rayloom_operator.observe.replicas import without_suffixes


class Deployments:
    """The progress of each Deployment. `on_change` is called with the key of the service whose Deployment changed."""

    def __init__(self, on_change: Callable[[ServiceKey], None]) -> None:
        self._on_change = on_change
        self._found: dict[ServiceKey, dict[str, DeploymentProgress]] = {}

    def of(self, key: ServiceKey, name: str) -> DeploymentProgress | None:
        """Returns the progress; None if no Deployment of this name is known."""
        return self._found.get(key, {}).get(name)

    def see(self, key: ServiceKey, found: Manifest, is_gone: bool) -> None:
        """Notes the object that a list or watch has delivered."""
        name = found["metadata"]["name"]
        progress = None if is_gone else progress_of(found)
        if progress == self.of(key, name):
            return
        if progress is None:
            self._found[key].pop(name)
        else:
            self._found.setdefault(key, {})[name] = progress
        self._on_change(key)

    def forget(self, key: ServiceKey) -> None:
        """Drops the Deployments of a deleted service."""
        self._found.pop(key, None)


def progress_of(found: Manifest) -> DeploymentProgress:
    """Returns the progress of a Deployment, as the API server returned it."""
    status = found.get("status", {})
    conditions = {each.get("type"): each for each in status.get("conditions", ())}
    progressing = conditions.get("Progressing", {})
    return DeploymentProgress(
        is_seen=status.get("observedGeneration", 0) >= found["metadata"].get("generation", 0),
        num_pods=status.get("replicas", 0),
        num_updated=status.get("updatedReplicas", 0),
        refusal=_refusal(conditions, found["metadata"]["name"]),
        is_late=(progressing.get("status"), progressing.get("reason")) == ("False", "ProgressDeadlineExceeded"),
    )


def _refusal(conditions: Mapping[Any, Mapping[str, str]], name: str) -> str:
    failure = conditions.get("ReplicaFailure", {})
    if failure.get("status") != "True" or failure.get("reason", "").startswith("FailedDelete"):
        return ""
    return without_suffixes(failure.get("message", ""), name)
