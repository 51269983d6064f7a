"""Adapter: a LoRA adapter in `spec.model.adapters`, on the hub, in a claim or in a folder of the nodes."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from rayloom_operator.api.base import MAP_BY_NAME, Part, rules
from rayloom_operator.api.mounted_folders import CLOSED, HIDING, MODELS_FOLDER, UP, UP_IN_WORDS, taken_in_words
from rayloom_operator.api.pod_template.reserved_parts import ADAPTER_VOLUMES, ADAPTERS_FOLDER

MAX_ADAPTERS = 64
# The largest number of claims and node folders that a pod mounts for adapters. The operator reserves a volume name for
# each.
MAX_PLACES = len(ADAPTER_VOLUMES)
_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$"
_CLAIM = r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[\w.-]+)*/?"
_FOLDER = r"file:///[^/]+(/[^/]+)+/?"
# A revision may contain slashes, such as refs/pr/1.
_HUB = r"hf://[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@\w[\w./-]*)?"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SOURCES_IN_WORDS = "hf://ORG/NAME, hf://ORG/NAME@REVISION, pvc://CLAIM/PATH or file:///FOLDER/NAME"
HUB_ONLY_IN_WORDS = (
    "tokenSecretRef and cache have an effect for hf:// sources of the model, its draft model or an adapter only: "
    "remove them, or use an hf:// source"
)
_TAKEN = re.compile(rf"^file://(({'|'.join(HIDING)})/[^/]+/?|({'|'.join(CLOSED)})/.*)$")
_TAKEN_IN_WORDS = (
    f"pods mount FOLDER at its own path, {taken_in_words('FOLDER')}. "
    "Move the adapter, for example to /data/adapters or /opt/adapters of the nodes"
)
MODELS_IN_WORDS = (
    f"the claim of the model is mounted at {MODELS_FOLDER}, so no adapter can be in this folder of the nodes: move it "
    "to another folder, or into a claim"
)
PLACES_IN_WORDS = (
    f"the adapters are in more than {MAX_PLACES} claims and folders: put them into fewer; adapters in one claim, or "
    "side by side in one folder, count once"
)
ON_CPU_IN_WORDS = (
    "LoRA adapters work on CPU only, and an empty list keeps memory for them: remove model.adapters, or remove "
    "accelerator and engine.args.device cuda, or merge an adapter into the model"
)
OTHER_NAME_IN_WORDS = "an adapter has the name of the model; give it another name, or set model.servedName"


class Adapter(Part):
    name: str = Field(
        pattern=_NAME,
        max_length=63,
        description="Name that clients put into `model`: letters, digits, '.', '_', '-' and '/', at most 63 "
        "characters.",
    )
    source: str = Field(
        max_length=512,
        description=f"Place of the adapter in PEFT's format: {_SOURCES_IN_WORDS}. hf:// is a repository of the hub, "
        "at a branch, tag or commit; pvc:// is a folder in a PersistentVolumeClaim of the service's namespace; file:// "
        "is a folder of the nodes, of which pods mount FOLDER.",
        json_schema_extra=rules(
            (
                f"self.matches({json.dumps(f'^({_HUB}|{_CLAIM}|{_FOLDER})$')})",
                f"this is not the source of an adapter; use {_SOURCES_IN_WORDS}",
            ),
            (f"!self.matches({json.dumps(UP.pattern)})", UP_IN_WORDS),
            (f"!self.matches({json.dumps(_TAKEN.pattern)})", _TAKEN_IN_WORDS),
        ),
    )

    @field_validator("source")
    @classmethod
    def _source_is_known(cls, source: str) -> str:
        if not re.fullmatch(f"{_HUB}|{_CLAIM}|{_FOLDER}", source, re.ASCII):
            raise ValueError(f"{source!r} is not the source of an adapter; use {_SOURCES_IN_WORDS}")
        if UP.search(source):
            raise ValueError(f"{source!r} is not allowed: {UP_IN_WORDS}")
        if _TAKEN.search(source):
            raise ValueError(f"{source!r} is not allowed: {_TAKEN_IN_WORDS}")
        return source

    @property
    def is_on_hub(self) -> bool:
        return self.source.startswith("hf://")

    def at(self, commit: str) -> str:
        """Returns the source of this adapter of the hub, with `commit` as its revision."""
        return f"{self.source.partition('@')[0]}@{commit}"

    @property
    def own_commit(self) -> str | None:
        """The commit that the source of an adapter of the hub names; None if it names no commit."""
        revision = self.source.partition("@")[2] if self.is_on_hub else ""
        return revision if is_commit(revision) else None

    @property
    def claim(self) -> str | None:
        """Name of the PersistentVolumeClaim; None for an adapter in another place."""
        return self._path.partition("/")[0] if self.source.startswith("pvc://") else None

    @property
    def path(self) -> str:
        """The adapter's path in its claim, without a slash at either end, or its absolute path on the nodes.

        For an adapter of the hub: its source.
        """
        if self.is_on_hub:
            return self.source
        return self._path.partition("/")[2].strip("/") if self.claim is not None else self._path.rstrip("/")

    @property
    def host_folder(self) -> str | None:
        """The node folder that pods mount: the parent of the adapter's folder. None for an adapter in another place."""
        return posixpath.dirname(self.path) if self.source.startswith("file://") else None

    @property
    def _path(self) -> str:
        return self.source.partition("://")[2]


def _can_be_mounted(adapters: tuple[Adapter, ...]) -> tuple[Adapter, ...]:
    names = [each.name for each in adapters]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} is given more than once; give each adapter a name of its own")
    if len(claims(adapters)) + len(host_folders(adapters)) > MAX_PLACES:
        raise ValueError(PLACES_IN_WORDS)
    return adapters


Adapters = Annotated[
    tuple[Adapter, ...],
    Field(strict=False, max_length=MAX_ADAPTERS, json_schema_extra=MAP_BY_NAME),
    AfterValidator(_can_be_mounted),
]


def is_commit(revision: str) -> bool:
    """Returns whether `revision` is the whole hash of a commit."""
    return _COMMIT.fullmatch(revision) is not None


def volume_sources(adapters: Iterable[Adapter], model_claim: str | None, model_path: str | None) -> list[str]:
    """Returns the claims and folders that pods mount for adapters alone.

    `model_claim` and `model_path` are left out, because pods mount them for the model.
    """
    given = tuple(adapters)
    return [*(claim for claim in claims(given) if claim != model_claim), *host_folders(given, model_path)]


def adapter_folders(adapters: Iterable[Adapter]) -> list[str]:
    """Returns the paths in containers that no other mount may hide: each adapter's path, and ADAPTERS_FOLDER."""
    mounted = (each for each in adapters if not each.is_on_hub)
    paths = (each.path if each.claim is None else f"{ADAPTERS_FOLDER}/{each.claim}/{each.path}" for each in mounted)
    return [ADAPTERS_FOLDER, *paths]


def claims(adapters: Iterable[Adapter]) -> list[str]:
    """Returns the names of the claims with adapters, sorted."""
    return sorted({each.claim for each in adapters if each.claim is not None})


def host_folders(adapters: Iterable[Adapter], model_path: str | None = None) -> list[str]:
    """Returns the node folders that contain adapters, sorted. A folder inside another of them is left out.

    `model_path` and folders inside it are left out, too, because `model_path` is mounted for the model.
    """
    found = sorted({each.host_folder for each in adapters if each.host_folder is not None})
    others = found if model_path is None else [*found, model_path]
    return [
        folder
        for folder in found
        if folder != model_path and not any(folder.startswith(f"{other}/") for other in others)
    ]
