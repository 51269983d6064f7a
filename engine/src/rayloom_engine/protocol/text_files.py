"""The files of a model that a front needs: their names, their hashes, and the parts that a core sends to a gateway."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rayloom_engine.protocol.messages import FetchFile, FilePart, ServedModel, TextFile

TOKENIZER = "tokenizer.json"
# Names of the files. A gateway writes no file with another name.
TEXT_FILES = (TOKENIZER, "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
PART_BYTES = 1024 * 1024
MAX_FILE_BYTES = 256 * 1024 * 1024


def text_files(folder: Path) -> tuple[TextFile, ...]:
    """Returns the text files that a model's folder has. Raises OSError."""
    found = []
    for name in TEXT_FILES:
        path = folder / name
        if path.is_file():
            content = path.read_bytes()
            found.append(TextFile(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))
    return tuple(found)


def read_part(model: ServedModel | None, wanted: FetchFile) -> FilePart:
    """Returns a part of one of the model's text files; empty if there is no such file or it cannot be read."""
    files = () if model is None else model.text_files
    names = [file.name for file in files if file.sha256 == wanted.sha256]
    if model is None or not names or wanted.start < 0:
        return FilePart(wanted.sha256, wanted.start, b"")
    try:
        with (Path(model.path) / names[0]).open("rb") as file:
            file.seek(wanted.start)
            return FilePart(wanted.sha256, wanted.start, file.read(PART_BYTES))
    except OSError:
        return FilePart(wanted.sha256, wanted.start, b"")
