"""Checked access to a model folder's JSON files. Every complaint is a ModelError that names the file and the field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayloom_engine.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError when it is missing, unreadable or something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist; a model folder needs config.json, *.safetensors and tokenizer.json",
            "NotFound",
        ) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(document).__name__}")
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigJson:
    """A JSON object and the file it is from. In every getter an explicit null counts as absent."""

    path: Path
    values: dict[str, Any]

    def get(self, field: str, default: Any = None) -> Any:
        """The raw value; the default only where the field is absent, not where it is null."""
        return self.values.get(field, default)

    def count(self, field: str, default: int | None = None, at_least: int = 1) -> int:
        value = self._value(field, default, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ModelError(f"{self.path}: {field} must be a whole number >= {at_least}, given {value!r}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self._value(field, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ModelError(f"{self.path}: {field} must be a number > 0, given {value!r}")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self._value(field, False, "true or false")
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {field} must be true or false, given {value!r}")
        return value

    def text(self, field: str, default: str) -> str:
        return str(self._value(field, default, "a text"))

    def mapping(self, field: str) -> dict[str, Any]:
        value = self._value(field, {}, "an object")
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: {field} must be an object, given {value!r}")
        return value

    def _value(self, field: str, default: Any, wanted: str) -> Any:
        value = self.values.get(field)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.path}: {field} is missing; it must be {wanted}")
        return default
