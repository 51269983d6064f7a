"""TextCache: the texts of models, which engines handed over, in a folder of the gateway.

The text of a model is its tokenizer, chat template and generation config.

FOLDER/texts/HASH/tokenizer.json, ..., model.json    one folder for each model, complete or absent
FOLDER/texts/HASH-1/...                               another copy, written because HASH was damaged
FOLDER/SERVICE.last                                   the folder in texts/ that a service used last; SERVICE: a hash

Gateways share the folder without a lock: a copy is renamed into its place as a whole, and never changed or removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.protocol.messages import ServedModel, TextFile
from rayloom_engine.protocol.text_files import MAX_FILE_BYTES, TEXT_FILES, TOKENIZER

_MODEL = "model.json"
_HASH = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"[0-9a-f]{64}(-[0-9]+)?")


def text_hash(model: ServedModel) -> str:
    """Returns the name of a model's text in the cache: a hash of `model`, which has the hashes of the text files."""
    # the hash leaves out the path of the folder, which differs between pods
    neutral = msgspec.structs.replace(model, path="")
    return hashlib.sha256(msgspec.json.encode(neutral)).hexdigest()


class TextCache:
    """A folder with texts. Several gateways may share it."""

    def __init__(self, folder: Path, service: str) -> None:
        """`service`: the model's name in the API. Raises ConfigError if the folder cannot be written."""
        self._texts = folder / "texts"
        self._last = folder / f"{hashlib.sha256(service.encode()).hexdigest()[:16]}.last"
        try:
            self._texts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cache_dir: cannot write {folder}: {error.strerror}") from error

    def last(self) -> ServedModel | None:
        """Returns the model that the service used last, with its folder in this cache as `path`.

        Returns None if no model is recorded, or if the files of the model's text in this cache are damaged.
        """
        try:
            name = self._last.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
        return self._load(name) if _FOLDER.fullmatch(name) else None

    def find(self, model: ServedModel) -> ServedModel | None:
        """Returns `model` with its folder in this cache as `path`; None if its files must be fetched."""
        for name in _names(model):
            if not (self._texts / name).exists():
                return None
            found = self._load(name)
            if found is not None:
                return found
        return None

    def store(self, model: ServedModel, contents: Mapping[str, bytes]) -> ServedModel:
        """Stores the files of a model (hash -> content), and returns the model with its folder in this cache as `path`.

        Raises ModelError if a content does not have its hash, or the folder cannot be written.
        """
        check_files(model.text_files)
        try:
            part = Path(tempfile.mkdtemp(prefix="part-", dir=self._texts))
            try:
                for file in model.text_files:
                    content = contents[file.sha256]
                    _check_content(file, content)
                    (part / file.name).write_bytes(content)
                (part / _MODEL).write_bytes(msgspec.json.encode(model))
                return self._keep(part, model)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        except OSError as error:
            raise ModelError(f"cannot write the tokenizer into {self._texts}: {error}") from error

    def use(self, model: ServedModel) -> None:
        """Records that the service uses `model` from now on.

        On a full disk, nothing is recorded, which only makes the next start slower.
        """
        with contextlib.suppress(OSError):
            # The file gets a random name, because gateways in several containers may have the same process id.
            descriptor, part = tempfile.mkstemp(prefix="part-", dir=self._last.parent)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(Path(model.path).name)
                os.replace(part, self._last)
            finally:
                Path(part).unlink(missing_ok=True)

    def _keep(self, part: Path, model: ServedModel) -> ServedModel:
        """Renames the complete folder `part` to the model's folder, unless another gateway did so. Raises OSError."""
        for name in _names(model):
            try:
                os.rename(part, self._texts / name)  # fails if there is a folder with files
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            stored = self._load(name)
            if stored is not None:
                return stored
        raise AssertionError("the names do not end")

    def _load(self, name: str) -> ServedModel | None:
        folder = self._texts / name
        try:
            model = msgspec.json.decode((folder / _MODEL).read_bytes(), type=ServedModel)
            check_files(model.text_files)
            for file in model.text_files:
                _check_content(file, (folder / file.name).read_bytes())
        except (OSError, msgspec.MsgspecError, ModelError):
            return None
        return msgspec.structs.replace(model, path=str(folder))


def _names(model: ServedModel) -> Iterator[str]:
    """Yields folder names for a model's text, without end. A name is used if the folders of all names before it
    are damaged."""
    name = text_hash(model)
    yield name
    for number in itertools.count(1):
        yield f"{name}-{number}"


def check_files(files: tuple[TextFile, ...]) -> None:
    """Raises ModelError unless a gateway accepts these files from an engine."""
    names = [file.name for file in files]
    if TOKENIZER not in names:
        raise ModelError("the engine hands over no tokenizer.json; put the model's tokenizer.json into its folder")
    for file in files:
        if file.name not in TEXT_FILES or file.num_bytes > MAX_FILE_BYTES or not _HASH.fullmatch(file.sha256):
            raise ModelError(f"the engine offers {file.name!r} with {file.num_bytes} bytes, which is not accepted")


def _check_content(file: TextFile, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise ModelError(f"{file.name} does not have the hash {file.sha256[:12]} that the engine named")
