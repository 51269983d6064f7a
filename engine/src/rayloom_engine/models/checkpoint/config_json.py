"""Checked access to a model folder's JSON files. Every error is a ModelError that names the file and the field."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayloom_engine.errors import EngineError, ModelError, shown, word
from rayloom_engine.models.checkpoint.limits import MAX_JSON_BYTES, MAX_NAME_BYTES, MAX_POSITIONS

# The errors that Python, and libraries that read model files, may raise for arbitrary content.
_READ_ERRORS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError)


@contextlib.contextmanager
def refuses_broken(path: Path | str) -> Iterator[None]:
    """Turns every error that a model file's content can cause into a ModelError that names the file.

    Use `with refuses_broken(path):` around the code that reads the file. The getters below also name the field. This
    context manager handles content that the getters do not check.
    """
    try:
        yield
    except EngineError:
        raise
    except RecursionError as error:
        raise ModelError(f"{path} cannot be used: it is nested too deeply") from error
    except MemoryError as error:
        raise ModelError(f"{path} cannot be used: it takes more memory than there is") from error
    except _READ_ERRORS as error:
        raise ModelError(f"{path} cannot be used: {type(error).__name__}: {word(str(error))}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises ModelError if the file is missing, unreadable or too large, or holds no object.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ModelError(
                f"{path} is not a file; a model folder needs config.json, *.safetensors and tokenizer.json"
            )
        if found.st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {found.st_size} bytes; a JSON file of a model may have {MAX_JSON_BYTES}")
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist; a model folder needs config.json, *.safetensors and tokenizer.json",
            "NotFound",
        ) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{path} is not JSON that can be used: it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(document).__name__}")
    return document


def is_plain_file_name(name: object, suffix: str) -> bool:
    """Returns whether a name, read from an untrusted file, can only mean a file in the same folder."""
    return (
        isinstance(name, str)
        and name.endswith(suffix)
        and name.isprintable()
        and not set(name) & {"/", "\\"}
        and len(name.encode(errors="replace")) <= MAX_NAME_BYTES
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigJson:
    """Named values, usually a JSON object, and the file that holds them.

    All getters except `get` treat null as absent.
    """

    path: Path
    values: dict[str, Any]

    def get(self, field: str, default: Any = None) -> Any:
        """Returns the raw value. The default replaces an absent field, but not a null."""
        return self.values.get(field, default)

    def count(self, field: str, default: int | None = None, *, at_least: int = 1, at_most: int = MAX_POSITIONS) -> int:
        """Returns a whole number. 11008.0 counts as a whole number, too.

        For a number above `at_most`, the error is "Unsupported": the file is valid, but the engine cannot use it.
        """
        value = self._value(field, default, "a whole number")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ModelError(f"{self.path}: {field} must be a whole number >= {at_least}, given {shown(value)}")
        if value > at_most:
            raise ModelError(
                f"{self.path}: {field} {shown(value)} is not supported; works: {at_least} to {at_most}", "Unsupported"
            )
        return value

    def number(self, field: str, default: float | None = None, *, at_most: float) -> float:
        """Returns a number above 0. `at_most`: as in `count`."""
        value = self._value(field, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ModelError(f"{self.path}: {field} must be a number > 0, given {shown(value)}")
        if value > at_most:
            raise ModelError(
                f"{self.path}: {field} {shown(value)} is not supported; works: numbers up to {at_most:g}", "Unsupported"
            )
        return float(value)

    def flag(self, field: str) -> bool:
        value = self._value(field, False, "true or false")
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {field} must be true or false, given {shown(value)}")
        return value

    def text(self, field: str, default: str) -> str:
        value = self._value(field, default, "a text")
        if not isinstance(value, str):
            raise ModelError(f"{self.path}: {field} must be a text, given {shown(value)}")
        return value

    def texts(self, field: str) -> list[str]:
        value = self._value(field, None, "a list of texts")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self.path}: {field} must be a list of texts, given {shown(value)}")
        return value

    def mapping(self, field: str) -> dict[str, Any]:
        value = self._value(field, {}, "an object")
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: {field} must be an object, given {shown(value)}")
        return value

    def _value(self, field: str, default: Any, wanted: str) -> Any:
        value = self.values.get(field)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.path}: {field} is missing; it must be {wanted}")
        return default
