"""Files from the Hugging Face hub, through the hub library and its cache. No other module imports that library."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rayloom_engine.errors import ModelError
from rayloom_engine.models.checkpoint.progress import Progress, no_progress

logger = logging.getLogger(__name__)

CONFIG = ("config.json", "generation_config.json")
NO_WEIGHTS = ("*.json", "*.jinja", "tokenizer*", "*.model", "vocab.txt", "merges.txt")
EVERYTHING = ("*.safetensors", *NO_WEIGHTS)
# Files with the same weights in other formats. Some models keep such files in subfolders; Mistral's models keep them
# next to the usual files.
_UNWANTED = ("*/*", "consolidated*.safetensors")


def download(
    repository: str, revision: str | None, progress: Progress, wanted: Sequence[str] = EVERYTHING
) -> tuple[Path, str]:
    """Returns the folder and the commit of a hub model. Downloads the model if the hub library's cache lacks it.

    `wanted`: patterns of file names. Several processes may call this at once, even if the cache is a shared folder,
    because the hub library locks each file. Raises ModelError if the model or revision does not exist, needs an access
    token, or cannot be reached.
    """
    # Imported here because the import takes half a second, which local models should not pay at start.
    from huggingface_hub import errors, snapshot_download

    name = f"hf://{repository}" + (f" at revision {revision}" if revision else "")
    find = partial(
        snapshot_download,
        repository,
        revision=revision,
        allow_patterns=list(wanted),
        ignore_patterns=list(_UNWANTED),
    )
    try:
        try:
            folder = find(tqdm_class=_progress_bar(progress))
        except errors.RevisionNotFoundError as missing:
            if revision is None or not is_commit(revision):
                raise
            # The owner may have removed the commit from the hub. An engine that serves it must be able to restart a
            # process.
            try:
                folder = find(local_files_only=True)
            except errors.LocalEntryNotFoundError:
                raise missing from None
    except errors.HFValidationError as error:
        raise ModelError(f"{name} is not a hub id; a hub id is ORG/NAME: {error}") from error
    # Versions of the hub library use different HTTP clients. HTTPError is the library's alias for the client's error.
    except (errors.LocalEntryNotFoundError, errors.HTTPError, ConnectionError) as error:
        raise _explained(name, error) from error
    except OSError as error:
        raise ModelError(f"{name} cannot be stored: {error}; set HF_HOME to a folder with room") from error
    path = Path(folder)
    return path, path.name  # in the cache, a snapshot's folder is named after its commit


def download_file(repository: str, revision: str | None, name: str, at_most: int, cure: str) -> Path | None:
    """Returns a file in the hub library's cache; None if the repository does not have the file at `revision`.

    Downloads the file if the cache does not have it. A file of more than `at_most` bytes is not downloaded; the error
    message ends with `cure`. The folder of the file is named after its commit. If the hub does not answer, and
    `revision` is a branch or tag, returns the file of the commit that the cache has for this branch or tag. Several
    processes may call this at once. Raises ModelError.
    """
    from huggingface_hub import errors

    title = f"hf://{repository}" + (f"@{revision}" if revision else "")
    if revision is not None and is_commit(revision) and (found := cached_file(repository, revision, name)) is not None:
        return found
    try:
        num_bytes = _size_on_hub(repository, revision, name)
    except errors.HFValidationError as error:
        raise ModelError(f"{title} is not a hub id; a hub id is ORG/NAME: {error}") from error
    except errors.EntryNotFoundError:
        return None
    except (errors.HTTPError, OSError) as error:
        problem = _explained(title, error)
        found = cached_file(repository, revision, name) if problem.fault == "Unreachable" else None
        if found is None:
            raise problem from error
        logger.warning("%s: the hub cannot be reached, so the local hub cache is used", title)
        return found
    if num_bytes is None or num_bytes > at_most:
        size = "a size that the hub does not give" if num_bytes is None else f"{num_bytes} bytes"
        raise ModelError(f"{title}: {name} has {size}, at most {at_most} are allowed; {cure}", "Unsupported")
    folder, _ = download(repository, revision, no_progress, (name,))
    return folder / name


def cached_file(repository: str, revision: str | None, name: str) -> Path | None:
    """Returns a file in the hub library's cache; None if the cache does not have it. Uses no network."""
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        found = try_to_load_from_cache(repository, name, revision=revision)
    except errors.HFValidationError as error:
        raise ModelError(f"hf://{repository} is not a hub id; a hub id is ORG/NAME: {error}") from error
    return Path(found) if isinstance(found, str) else None


def is_commit(revision: str) -> bool:
    """Returns True if `revision` is the whole hash of a commit, whose files never change."""
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def _size_on_hub(repository: str, revision: str | None, name: str) -> int | None:
    """Returns the size of a file in bytes; None if the hub does not give it. Raises the hub library's errors."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    num_bytes: int | None = get_hf_file_metadata(hf_hub_url(repository, name, revision=revision)).size
    return num_bytes


def _explained(name: str, error: Exception) -> ModelError:
    """Returns the error to show for the repository `name`, after the hub refused a request or did not answer."""
    from huggingface_hub import errors

    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
    code = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else None
    if isinstance(cause, errors.GatedRepoError):
        return ModelError(
            f"{name} needs access: accept its terms on the hub, then set HF_TOKEN to a token of that account", "Gated"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return ModelError(f"{name}: there is no such branch, tag or commit", "NotFound")
    if isinstance(cause, errors.RepositoryNotFoundError):
        return ModelError(
            f"{name} does not exist on the hub, or is private; check the name, or set HF_TOKEN to a token "
            f"that may read it",
            # For a missing and for a private model alike, the hub answers 401 if the client has no token.
            "NoAccess" if code == 401 else "NotFound",
        )
    if code in (401, 403):
        token = "the token in HF_TOKEN: it is wrong or has expired" if code == 401 else "access"
        return ModelError(f"{name}: the hub refuses {token}; set HF_TOKEN to a token that may read it", "NoAccess")
    return ModelError(
        f"{name} is not in the local hub cache and the hub cannot be reached ({_first_line(error)}); "
        f"check the network and HF_ENDPOINT, or give a local folder",
        "Unreachable",
    )


def _first_line(error: Exception) -> str:
    # Leave out request ids, so that repeated failures have equal messages.
    lines = re.sub(r" *\(Request ID: [^)]*\)", "", str(error)).splitlines()
    return lines[0] if lines else type(error).__name__


def _progress_bar(progress: Progress) -> Any:
    """Returns a class of progress bar for the hub library. It draws nothing and reports the bytes to `progress`.

    The library has two bars of bytes, one for receiving and one for writing to disk, with the same total. Only the bar
    that is ahead is reported. Otherwise the reported number would jump back and forth.
    """
    from tqdm import tqdm

    most = 0

    class Bar(tqdm):  # type: ignore[type-arg] # tqdm is generic in its stubs, but not at run time
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            # A disabled bar does not count by itself.
            self.n += n or 0
            nonlocal most
            if self.counts_bytes and self.n > most:
                most = int(self.n)
                progress("resolve", most, int(self.total or 0), "bytes")
            return None

    return Bar
