"""Models from the Hugging Face hub, through the hub library's own cache. The only place that imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayloom_engine.errors import ModelError
from rayloom_engine.models.progress import Progress

_WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "vocab.txt", "merges.txt")
_UNWANTED = ("*/*",)  # other formats of the same weights, which some models keep in folders


def download(repository: str, revision: str | None, progress: Progress) -> tuple[Path, str]:
    """The folder and the commit of a hub model, fetched unless they are in the hub library's cache.

    Raises ModelError for a model or revision that does not exist, that needs an access token, or that cannot be
    reached.
    """
    # Only here, and not at the top: it takes half a second, which a local model should not pay.
    import httpx
    from huggingface_hub import errors, snapshot_download

    name = f"hf://{repository}" + (f" at revision {revision}" if revision else "")
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            tqdm_class=_progress_bar(progress),
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} needs access: accept its terms on the hub, then set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} does not exist on the hub, or is private; check the name, or set HF_TOKEN to a token "
            f"that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{name}: there is no such branch, tag or commit") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{name} is not a hub id; a hub id is ORG/NAME: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, httpx.HTTPError, ConnectionError) as error:
        raise ModelError(
            f"{name} is not in the local hub cache and the hub cannot be reached ({_first_line(error)}); "
            f"check the network and HF_ENDPOINT, or give a local folder"
        ) from error
    except OSError as error:
        raise ModelError(f"{name} cannot be stored: {error}; set HF_HOME to a folder with room") from error
    path = Path(folder)
    return path, path.name  # the cache names a snapshot's folder by its commit


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _progress_bar(progress: Progress) -> Any:
    """A class of the hub library's bar protocol that draws nothing and tells `progress` the bytes."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg] # generic in the stubs alone, not at run time
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            # A disabled bar counts nothing by itself.
            self.n += n or 0
            if self.counts_bytes:
                progress("resolve", int(self.n), int(self.total or 0), "bytes")
            return None

    return Bar
