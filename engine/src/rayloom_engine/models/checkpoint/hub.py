"""Models from the Hugging Face hub, through the hub library and its cache. No other module imports that library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayloom_engine.errors import ModelError
from rayloom_engine.models.checkpoint.progress import Progress

CONFIG = ("config.json", "generation_config.json")
NO_WEIGHTS = ("*.json", "*.jinja", "tokenizer*", "*.model", "vocab.txt", "merges.txt")
EVERYTHING = ("*.safetensors", *NO_WEIGHTS)
# Files with the same weights in other formats. Some models keep such files in subfolders; Mistral's models keep them
# next to the usual files.
_UNWANTED = ("*/*", "consolidated*.safetensors")


def download(
    repository: str, revision: str | None, progress: Progress, wanted: Sequence[str] = EVERYTHING
) -> tuple[Path, str]:
    """Returns the folder and the commit of a hub model. Downloads it if the hub library's cache does not have it.

    `wanted`: patterns of file names. Several processes may call this at once, even if the cache is a shared folder,
    because the hub library locks each file. Raises ModelError if the model or revision does not exist, needs an access
    token, or cannot be reached.
    """
    # Imported here because the import takes half a second, which local models should not pay at start.
    from huggingface_hub import errors, snapshot_download

    name = f"hf://{repository}" + (f" at revision {revision}" if revision else "")
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(_UNWANTED),
            tqdm_class=_progress_bar(progress),
        )
    except errors.HFValidationError as error:
        raise ModelError(f"{name} is not a hub id; a hub id is ORG/NAME: {error}") from error
    # HTTPError is the hub library's alias for the error of its HTTP client, which differs between versions.
    except (errors.LocalEntryNotFoundError, errors.HTTPError, ConnectionError) as error:
        raise _explained(name, error) from error
    except OSError as error:
        raise ModelError(f"{name} cannot be stored: {error}; set HF_HOME to a folder with room") from error
    path = Path(folder)
    return path, path.name  # in the cache, a snapshot's folder is named after its commit


def _explained(name: str, error: Exception) -> ModelError:
    """Returns the error to show for the model `name`, after the hub refused a request or did not answer."""
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
    that is ahead is reported, because otherwise the number would jump back and forth.
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
