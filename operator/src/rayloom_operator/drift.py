"""Notices when somebody else changes a Service, ServiceAccount, NetworkPolicy or PodDisruptionBudget of ours.

Of those that an earlier operator has left the content is kept until the service's first pass, which so need not apply
what is as it should be. Afterwards only versions are kept. Left out are Secrets and ConfigMaps, because the operator
has no right to read them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from rayloom_operator.kube import Kube
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.reflector import Reflector, service_of, without_managed_fields

_KINDS = {
    "Service": "v1",
    "ServiceAccount": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
}
# Where a list is refused, or does not come, everything is applied.
_LIST_S = 10.0

# (kind, name) -> the object as JSON, which takes a fifth of the memory; empty when it is gone.
Found = dict[tuple[str, str], str]


class Drift:
    """Lives in one event loop. `on_change` gets the key of a service to look at: something was changed, by whomever."""

    def __init__(self, kube: Kube, on_change: Callable[[ServiceKey], None], **options: Any) -> None:
        self._on_change = on_change
        self._written: dict[ServiceKey, dict[str, str]] = {}  # uid -> version of what was applied, or found right, last
        self._seen: dict[ServiceKey, dict[str, str]] = {}  # the same of what was seen since; empty when it is gone
        self._found: dict[ServiceKey, Found] = {}  # of services that had no pass yet
        self.reflectors = tuple(_Teller(kube, version, kind, self._see, options) for kind, version in _KINDS.items())

    async def listed(self) -> None:
        """Returns once what an earlier operator has left is known."""
        waits = [asyncio.create_task(each.is_synced.wait()) for each in self.reflectors]
        _, late = await asyncio.wait(waits, timeout=_LIST_S)
        for each in late:
            each.cancel()

    def wrote(self, key: ServiceKey, answer: Manifest) -> None:
        """An object was applied, and this is what the API server says that it is now."""
        if answer["kind"] in _KINDS:
            self._written.setdefault(key, {})[answer["metadata"]["uid"]] = _version(answer)

    def first_look(self, key: ServiceKey) -> Found | None:
        """What an earlier operator has left of the service; None after the first call."""
        if key in self._written:
            return None
        self._written[key] = {}
        return self._found.pop(key, {})

    def is_right(self, key: ServiceKey, manifest: Manifest, found: Found) -> bool:
        """Whether the object was found as it should be, so that it need not be applied."""
        text = found.get((manifest["kind"], manifest["metadata"]["name"]))
        there = json.loads(text) if text else {}
        if not _covers(there, manifest):
            return False
        self.wrote(key, there)
        return True

    def take(self, key: ServiceKey) -> bool:
        """Whether somebody else has changed an object of the service since the last call."""
        written = self._written.get(key, {})
        # What is not known was made by another operator, and was looked at, or was applied in vain.
        return any(written.get(uid, version) != version for uid, version in self._seen.pop(key, {}).items())

    def forget(self, key: ServiceKey) -> None:
        for each in (self._written, self._seen, self._found):
            each.pop(key, None)

    def _see(self, key: ServiceKey, found: Manifest, is_gone: bool) -> None:
        uid, version = found["metadata"]["uid"], "" if is_gone else _version(found)
        if key not in self._written:
            name = found["kind"], found["metadata"]["name"]
            self._found.setdefault(key, {})[name] = "" if is_gone else json.dumps(found)
        if self._written.get(key, {}).get(uid) != version:
            self._seen.setdefault(key, {})[uid] = version
            self._on_change(key)


def _version(found: Manifest) -> str:
    # The status of a budget changes by itself.
    field = "generation" if found["kind"] == "PodDisruptionBudget" else "resourceVersion"
    return str(found["metadata"].get(field, ""))


def _covers(found: Any, wanted: Any) -> bool:
    """Whether `found` has everything that is in `wanted`. The API server adds defaults, others add what is theirs."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(_covers(found.get(name), each) for name, each in wanted.items())
    if isinstance(wanted, list):
        is_list = isinstance(found, list) and len(found) == len(wanted)
        return is_list and all(map(_covers, found, wanted))
    return bool(found == wanted)


class _Teller(Reflector):
    """Tells of each object instead of keeping it."""

    def __init__(
        self,
        kube: Kube,
        version: str,
        kind: str,
        on_object: Callable[[ServiceKey, Manifest, bool], None],
        options: dict[str, Any],
    ) -> None:
        super().__init__(kube, version, kind, lambda _: None, **options)
        self._type = {"apiVersion": version, "kind": kind}
        self._on_object = on_object

    def _take(self, kind: str, found: Manifest) -> None:
        if kind != "BOOKMARK":
            # Lists leave the type out.
            self._on_object(service_of(found), without_managed_fields(found) | self._type, kind == "DELETED")
