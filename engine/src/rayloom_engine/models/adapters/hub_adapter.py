"""HubAdapter: a LoRA adapter in a repository of the Hugging Face hub, named hf://ORG/NAME or hf://ORG/NAME@REVISION.

The front resolves the revision to a commit once, so that every rank reads the same files. The path of such an Adapter
is hf://ORG/NAME@COMMIT, because the hub library's cache may be in a different folder on each machine. A rank never
downloads in a step: its machine gets the files before the step (worker/adapter_files.py). The step reads only the
cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rayloom_engine.core.adapter import Adapter
from rayloom_engine.errors import ModelError, shown
from rayloom_engine.models.adapters.peft_config import CONFIG, read_peft_config
from rayloom_engine.models.adapters.peft_folder import WEIGHTS, adapter_of, check_rank, most_weight_bytes
from rayloom_engine.models.checkpoint.config_json import refuses_broken
from rayloom_engine.models.checkpoint.hub import cached_file, download_file
from rayloom_engine.models.checkpoint.limits import MAX_JSON_BYTES
from rayloom_engine.models.shape import ModelShape

HUB = "hf://"
_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>\w[\w./-]{0,254}))?")
# Weights in these files are pickled Python objects, which run code when they are read.
_PICKLED = ("adapter_model.bin", "adapter_model.pt")


@dataclass(frozen=True, slots=True)
class HubAdapter:
    """The place of an adapter on the hub. `revision`: a branch, tag or commit; None: the default branch."""

    repository: str
    revision: str | None

    def at(self, commit: str) -> str:
        """Returns the path of the Adapter with the files of this commit."""
        return f"{HUB}{self.repository}@{commit}"


def hub_adapter(path: str) -> HubAdapter | None:
    """Returns the place on the hub that a user has named; None if the user has named a folder. Raises ModelError.

    As with models, a path without hf:// is a hub id only if there is no folder with this path.
    """
    is_hub = path.startswith(HUB)
    found = _ID.fullmatch(path.removeprefix(HUB))
    if found is None:
        if is_hub:
            raise ModelError(
                f"{shown(path)} names no repository of the hub; write hf://ORG/NAME or hf://ORG/NAME@REVISION"
            )
        return None
    if not is_hub and Path(path).is_dir():
        return None
    # The hub library makes the revision a part of a path in its cache.
    if any(part in (".", "..") for part in (found["revision"] or "").split("/")):
        raise ModelError(f"{shown(path)}: a revision has no part '.' or '..'; name a branch, tag or commit")
    return HubAdapter(found["repository"], found["revision"])


def download_adapter(place: HubAdapter, shape: ModelShape, max_rank: int) -> tuple[Path, str]:
    """Returns the folder and the commit of an adapter. Downloads its two files if the cache does not have them.

    Checks adapter_config.json before the weights are downloaded, and the size of each file before its download. Raises
    ModelError.
    """
    title = place.at(place.revision) if place.revision else f"{HUB}{place.repository}"
    config = download_file(
        place.repository, place.revision, CONFIG, MAX_JSON_BYTES, "this is no adapter in PEFT's format"
    )
    if config is None:
        raise ModelError(
            f"{title} has no {CONFIG}, so it is no LoRA adapter in PEFT's format; name the repository of an adapter",
            "NotFound",
        )
    folder, commit = config.parent, config.parent.name
    with refuses_broken(folder):
        settings = read_peft_config(folder)
        if not settings.rank_pattern:  # a pattern may give all matrices of the file lower ranks
            check_rank(folder, settings.rank, max_rank)
    at_most = most_weight_bytes(shape, max_rank)
    cure = f"no adapter of LoRA rank {max_rank} for this model is larger: name another adapter, or raise max_lora_rank"
    if download_file(place.repository, commit, WEIGHTS, at_most, cure) is None:
        raise ModelError(f"{title} {_no_weights(place.repository, commit)}", "NotFound")
    return folder, commit


def fetch(adapter: Adapter, num_bytes: int) -> None:
    """Brings the files of an adapter of the hub into this machine's cache, and checks their digest. Raises ModelError.

    `num_bytes`: size of the larger of the two files that the front has.
    """
    place = hub_adapter(adapter.path)
    if place is None or place.revision is None:
        raise ModelError(f"{shown(adapter.path)} names no commit of the hub")
    for name in (CONFIG, WEIGHTS):
        cure = "the front has smaller files of this commit; load the adapter again"
        if download_file(place.repository, place.revision, name, num_bytes, cure) is None:
            raise ModelError(f"{adapter.path} has no {name} any more; load another revision", "NotFound")
    check_digest(adapter)


def local_folder(adapter: Adapter) -> Path:
    """Returns the folder of an adapter on this machine. Downloads nothing. Raises ModelError."""
    if not adapter.path.startswith(HUB):
        return Path(adapter.path)
    place = hub_adapter(adapter.path)
    files = [] if place is None else [cached_file(place.repository, place.revision, name) for name in (CONFIG, WEIGHTS)]
    if not files or files[0] is None or files[1] is None:
        raise ModelError(
            f"{adapter.path} is not in the hub cache of this rank's machine; the rank fetches it in the background: "
            "send the request again in a minute",
            "NotFound",
        )
    return files[0].parent


def check_digest(adapter: Adapter) -> Path:
    """Returns the folder of an adapter on this machine. Raises ModelError if its files do not have the digest."""
    folder = local_folder(adapter)
    if adapter_of(folder).digest != adapter.digest:
        raise ModelError(f"{folder}: the files of the adapter have changed since it was loaded; load it again")
    return folder


def _no_weights(repository: str, commit: str) -> str:
    for name in _PICKLED:
        # With 0 bytes allowed, a file that exists is refused, and nothing is downloaded.
        try:
            if download_file(repository, commit, name, 0, "") is None:
                continue
        except ModelError as error:
            if error.fault != "Unsupported":
                continue
        return (
            f"has its weights only in {name}, which can run code when it is read; convert it to {WEIGHTS} with PEFT "
            "(save_pretrained), or name another adapter"
        )
    return f"has no {WEIGHTS}; name the repository of an adapter whose weights are in this file"
