"""ModelsFile: the models of a gateway in a JSON file, which is read again when it changes."""

from __future__ import annotations

import logging
from pathlib import Path

from rayloom_engine.errors import ConfigError
from rayloom_engine.front.gateway.file_watch import FileWatch
from rayloom_engine.front.gateway.gateway_config import load_gateway_document
from rayloom_engine.front.gateway.models.models_document import ModelsDocument, UsableModels, parse_models

logger = logging.getLogger(__name__)


class ModelsFile(FileWatch[ModelsDocument]):
    """A file with a ModelsDocument. Entries that cannot be used are left out and logged."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, self._usable, "the models stay unchanged")
        self._problems: tuple[str, ...] = ()

    def _usable(self, path: Path) -> ModelsDocument:
        found = load_models(path)
        # Logged once, although a file whose models could not be applied is read again and again.
        if found.problems != self._problems:
            for problem in found.problems:
                logger.error("models_file %s: %s; until this is corrected, it is not served", path, problem)
            self._problems = found.problems
        return found.document


def load_models(path: Path) -> UsableModels:
    """Returns the models in a file. Raises ConfigError if no part of the file can be used."""
    document = load_gateway_document(path)
    try:
        return parse_models(document)
    except ConfigError as error:
        raise ConfigError(f"models_file {path}: {error}") from None
