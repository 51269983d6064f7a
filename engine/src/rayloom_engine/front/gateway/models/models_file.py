"""ModelsFile: the models of a gateway in a JSON file, which is read again when it changes."""

from __future__ import annotations

from pathlib import Path

from rayloom_engine.errors import ConfigError
from rayloom_engine.front.gateway.file_watch import FileWatch
from rayloom_engine.front.gateway.gateway_config import load_gateway_document
from rayloom_engine.front.gateway.models.models_document import ModelsDocument, parse_models


class ModelsFile(FileWatch[ModelsDocument]):
    """A file with a ModelsDocument."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, load_models, "the models stay unchanged")


def load_models(path: Path) -> ModelsDocument:
    """Returns the models in a file. Raises ConfigError."""
    document = load_gateway_document(path)
    try:
        return parse_models(document)
    except ConfigError as error:
        raise ConfigError(f"models_file {path}: {error}") from None
