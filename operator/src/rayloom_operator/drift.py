"""Notices when somebody else changes or deletes a Service, ServiceAccount or NetworkPolicy of ours.

Only versions are kept. Left out are Secrets and ConfigMaps, because the operator has no right to read them, and
PodDisruptionBudgets, because their status changes by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayloom_operator.kube import Kube
from rayloom_operator.names import SERVICE_LABEL, Manifest, ServiceKey
from rayloom_operator.reflector import Reflector

_KINDS = {"Service": "v1", "ServiceAccount": "v1", "NetworkPolicy": "networking.k8s.io/v1"}


class Drift:
    """Lives in one event loop. `on_change` gets the key of a service to look at: something was changed, by whomever."""

    def __init__(self, kube: Kube, on_change: Callable[[ServiceKey], None], **options: Any) -> None:
        self._on_change = on_change
        self._written: dict[ServiceKey, dict[str, str]] = {}  # uid -> resourceVersion of what was applied last
        self._seen: dict[ServiceKey, dict[str, str]] = {}  # the same of what was seen since; empty when it is gone
        self.reflectors = tuple(_Teller(kube, version, kind, self._see, options) for kind, version in _KINDS.items())

    def wrote(self, key: ServiceKey, answer: Manifest) -> None:
        """An object was applied, and this is what the API server says that it is now."""
        if answer["kind"] in _KINDS:
            self._written.setdefault(key, {})[answer["metadata"]["uid"]] = answer["metadata"]["resourceVersion"]

    def take(self, key: ServiceKey) -> bool:
        """Whether somebody else has changed an object of the service since the last call."""
        written = self._written.get(key, {})
        # What is not known was made by another operator, which applies all of it now, or was applied in vain.
        return any(written.get(uid, version) != version for uid, version in self._seen.pop(key, {}).items())

    def forget(self, key: ServiceKey) -> None:
        self._written.pop(key, None)
        self._seen.pop(key, None)

    def _see(self, key: ServiceKey, uid: str, version: str) -> None:
        if self._written.get(key, {}).get(uid) != version:
            self._seen.setdefault(key, {})[uid] = version
            self._on_change(key)


class _Teller(Reflector):
    """Tells of each object instead of keeping it."""

    def __init__(
        self,
        kube: Kube,
        version: str,
        kind: str,
        on_object: Callable[[ServiceKey, str, str], None],
        options: dict[str, Any],
    ) -> None:
        super().__init__(kube, version, kind, lambda _: None, **options)
        self._on_object = on_object

    def _take(self, kind: str, found: Manifest) -> None:
        if kind != "BOOKMARK":
            meta = found["metadata"]
            key = meta["namespace"], meta["labels"][SERVICE_LABEL]
            self._on_object(key, meta["uid"], "" if kind == "DELETED" else meta["resourceVersion"])
