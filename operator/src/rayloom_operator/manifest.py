"""Reads manifest files: YAML with one or several documents, of which exactly one is the LLMService to serve."""

from __future__ import annotations

from pathlib import Path

import yaml

from rayloom_operator.api import KIND, LLMService, parse
from rayloom_operator.errors import SpecError


def load_service(path: Path) -> LLMService:
    """The one LLMService in a YAML file; documents of other kinds are an error, so that nothing is left out in silence.

    Raises SpecError when the file cannot be read or used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError((f"cannot read {path}: {error.strerror}",)) from error
    except UnicodeDecodeError as error:
        raise SpecError((f"{path} is not UTF-8 text: {error.reason} at byte {error.start}",)) from error
    return service_in(text, str(path))


def service_in(text: str, name: str) -> LLMService:
    """The one LLMService in YAML text. `name` is the file's name in messages. Raises SpecError."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise SpecError((f"{name} is not YAML: {' '.join(str(error).split())}",)) from error
    if not documents:
        raise SpecError((f"{name} is empty; it must hold one {KIND}",))
    if len(documents) > 1:
        kinds = ", ".join(_kind(document) for document in documents)
        raise SpecError(
            (f"{name} holds {len(documents)} documents ({kinds}); keep exactly one {KIND} and remove the others",)
        )
    return parse(documents[0])


def _kind(document: object) -> str:
    kind = document.get("kind") if isinstance(document, dict) else None
    return str(kind) if kind else "no kind"
