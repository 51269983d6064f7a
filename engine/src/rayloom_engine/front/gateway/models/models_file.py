"""ModelsFile: the models of a gateway in a JSON file, which is read again when it changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from rayloom_engine.errors import ConfigError
from rayloom_engine.front.gateway.file_watch import FileWatch
from rayloom_engine.front.gateway.gateway_config import gateway_document, read_gateway_document
from rayloom_engine.front.gateway.models.gateway_status import MAX_PROBLEMS, ModelsFileStatus, content_hash, shortened
from rayloom_engine.front.gateway.models.models_document import ModelsDocument, UsableModels, parse_models

logger = logging.getLogger(__name__)


class ModelsFile(FileWatch[ModelsDocument]):
    """A file with a ModelsDocument. Entries that cannot be used are left out and logged."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, self._usable, "the models stay unchanged")
        self._problems: tuple[str, ...] = ()
        self._parsed = ModelsFileStatus()  # describes the content that was parsed last
        self._applied = ModelsFileStatus()

    def read(self) -> ModelsDocument:
        """Returns the models, which the caller applies. Raises ConfigError."""
        found = super().read()
        self._applied = self._parsed
        return found

    async def watch(self, on_change: Callable[[ModelsDocument], None]) -> None:
        """Calls `on_change` with the models whenever the file has changed, as FileWatch does."""

        def apply(document: ModelsDocument) -> None:
            on_change(document)
            self._applied = self._parsed

        await super().watch(apply)

    def status(self) -> ModelsFileStatus:
        """Returns which content of the file is in use, and the problems of this content or of newer content."""
        return self._applied.model_copy(update={"refusal": shortened(self.problem)})

    def _usable(self, path: Path) -> ModelsDocument:
        content = read_gateway_document(path)
        found = _models(content, path)
        self._parsed = ModelsFileStatus(
            hash=content_hash(content), problems=[shortened(each) for each in found.problems[:MAX_PROBLEMS]]
        )
        if found.problems != self._problems:  # log once: a file that could not be applied is read again
            for problem in found.problems:
                logger.error("models_file %s: %s; until this is corrected, it is not served", path, problem)
            self._problems = found.problems
        return found.document


def _models(content: bytes, path: Path) -> UsableModels:
    """Returns the models in the content of a file. Raises ConfigError if no part of the content can be used."""
    document = gateway_document(content, path)
    try:
        return parse_models(document)
    except ConfigError as error:
        raise ConfigError(f"models_file {path}: {error}") from None
