"""Notices when somebody else changes a Service, ServiceAccount, NetworkPolicy or PodDisruptionBudget of ours.

Of those that an earlier operator has left the content is kept until the service's first pass, which so need not apply
what is as it should be. Afterwards only versions are kept. Left out are Secrets and ConfigMaps, because the operator
has no right to read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import repeat
from typing import Any

from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.packed import Packer
from rayloom_operator.kube.reflector import Reflector, service_of, without_managed_fields
from rayloom_operator.names import Manifest, ServiceKey

_KINDS = {
    "Service": "v1",
    "ServiceAccount": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
}
# Where a list is refused, or does not come, everything is applied.
_LIST_S = 3.0
# What the API server adds to a port of a Service that is reached from outside.
_DEFAULTED = {"nodePort"}

# (kind, name) -> the object, packed; empty when it is gone.
Found = dict[tuple[str, str], bytes]


class Drift:
    """Lives in one event loop. `on_change` gets the key of a service to look at: something was changed, by whomever."""

    def __init__(self, kube: Kube, on_change: Callable[[ServiceKey], None], **options: Any) -> None:
        self._on_change = on_change
        self._written: dict[ServiceKey, dict[str, str]] = {}  # uid -> version of what was applied, or found right, last
        self._ours: dict[ServiceKey, dict[str, str]] = {}  # kind -> uid of an object that is ours, unchanged since
        self._seen: dict[ServiceKey, dict[str, str]] = {}  # the same of what was seen since; empty when it is gone
        self._found: dict[ServiceKey, Found] = {}  # of services that had no pass yet
        self._packers = {kind: Packer() for kind in _KINDS}
        self.reflectors = tuple(_Teller(kube, version, kind, self._see, options) for kind, version in _KINDS.items())

    async def listed(self) -> None:
        """Returns once what an earlier operator has left is known, or cannot be known soon."""
        waits = [asyncio.create_task(each.was_tried.wait()) for each in self.reflectors]
        _, late = await asyncio.wait(waits, timeout=_LIST_S)
        for each in late:
            each.cancel()

    def wrote(self, key: ServiceKey, answer: Manifest) -> None:
        """An object was applied, and this is what the API server says that it is now."""
        kind, uid, version = answer["kind"], answer["metadata"]["uid"], _version(answer)
        if kind not in _KINDS:
            return
        self._written.setdefault(key, {})[uid] = version
        if self._seen.get(key, {}).get(uid, version) == version:
            self._ours.setdefault(key, {})[kind] = uid

    def uid_of_ours(self, key: ServiceKey, kind: str) -> str | None:
        """The uid of the service's object of this kind, of which there is one; None unless it was applied or found
        right, and nobody else has changed it since."""
        return self._ours.get(key, {}).get(kind)

    def first_look(self, key: ServiceKey) -> Found | None:
        """What an earlier operator has left of the service; None after the first call."""
        if key in self._written:
            return None
        self._written[key] = {}
        return self._found.pop(key, {})

    def is_right(self, key: ServiceKey, manifest: Manifest, found: Found) -> bool:
        """Whether the object was found as it should be, so that it need not be applied."""
        packed = found.get((manifest["kind"], manifest["metadata"]["name"]))
        there = self._packers[manifest["kind"]].unpack(packed) if packed else {}
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
        for each in (self._written, self._ours, self._seen, self._found):
            each.pop(key, None)

    def _see(self, key: ServiceKey, found: Manifest, is_gone: bool) -> None:
        uid, version = found["metadata"]["uid"], "" if is_gone else _version(found)
        if key not in self._written:
            kind, name = found["kind"], found["metadata"]["name"]
            self._found.setdefault(key, {})[kind, name] = b"" if is_gone else self._packers[kind].pack(found)
        if self._written.get(key, {}).get(uid) != version:
            self._seen.setdefault(key, {})[uid] = version
            # Who owns it is read again before the next apply.
            self._ours.get(key, {}).pop(found["kind"], None)
            self._on_change(key)


def _version(found: Manifest) -> str:
    # The status of a budget changes by itself.
    field = "generation" if found["kind"] == "PodDisruptionBudget" else "resourceVersion"
    return str(found["metadata"].get(field, ""))


def _covers(found: Any, wanted: Any, is_whole: bool = False) -> bool:
    """Whether `found` has everything that is in `wanted`. The API server adds defaults, others add what is theirs.

    Where it `is_whole`, in lists and selectors, nothing else may be there: an addition there admits or selects others.
    """
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or (is_whole and found.keys() - wanted.keys() - _DEFAULTED):
            return False
        return all(
            _covers(found.get(name), each, is_whole or name.lower().endswith("selector"))
            for name, each in wanted.items()
        )
    if isinstance(wanted, list):
        is_list = isinstance(found, list) and len(found) == len(wanted)
        return is_list and all(map(_covers, found, wanted, repeat(True)))
    return bool(found == wanted)


class _Teller(Reflector):
    """Tells of each object instead of keeping it; also of those that went while there was no watch."""

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
        self._uids: dict[tuple[str, str], str] = {}  # by (namespace, name)

    def _take(self, kind: str, found: Manifest) -> None:
        if kind == "BOOKMARK":
            return
        key, meta = service_of(found), found["metadata"]
        at, uid = (key[0], meta["name"]), meta["uid"]
        before = self._key_at.get(at, key)
        # It may have another label, or be another one of that name.
        if kind == "DELETED" or (before, self._uids.get(at, uid)) != (key, uid):
            self._drop(before, meta["name"])
        if kind != "DELETED":
            self._key_at[at], self._uids[at] = key, uid
            # Lists leave the type out.
            self._on_object(key, without_managed_fields(found) | self._type, False)

    def _drop(self, key: ServiceKey, name: str) -> None:
        at = key[0], name
        if self._key_at.pop(at, None):
            self._on_object(key, self._type | {"metadata": {"name": name, "uid": self._uids.pop(at)}}, True)
