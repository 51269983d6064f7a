"""StructuredOutputs: the form that an answer must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError

MAX_CHOICES = 8_000  # the most choices; "0" to "7999" make a grammar of 55 KB
MAX_AFTER_CHARS = 64

_FORMS = ("json", "json_object", "regex", "choice", "grammar", "lark")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form that a request demands; exactly one of the fields `json` to `lark` is given.

    The fields have the names of vLLM's class, except `lark`, `is_lenient` and the fields after it. The constructor
    raises RequestError that names the wrong field.
    """

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema, as an object or as its text
    json_object: bool | None = None  # any JSON object
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # EBNF in GBNF's or Lark's syntax
    lark: str | None = None  # a grammar in llguidance's Lark syntax, as the tool parsers write it
    # Keywords of a JSON schema that cannot be enforced become warnings instead of an error.
    is_lenient: bool = False
    # The form begins after this text, such as the tag that ends the model's reasoning; empty: the form begins with the
    # answer.
    after: str = ""
    field: str = "structured_outputs"  # the field of the request that has the form, for error messages

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            named = " and ".join(given) if given else "none"
            raise RequestError(
                f"{self.field} must have exactly one of {', '.join(_FORMS[:-1])}, given {named}", self.field
            )
        for name in ("regex", "grammar", "lark", "after"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"{self.field}: {name} must be a string, given {shown(value)}", self.field)
        if self.json_object not in (None, True, False):
            raise RequestError(
                f"{self.field}: json_object must be true or false, given {shown(self.json_object)}", self.field
            )
        if self.json is not None and not isinstance(self.json, str | Mapping | bool):
            raise RequestError(f"{self.field} must have a JSON schema, an object, given {shown(self.json)}", self.field)
        if len(self.after) > MAX_AFTER_CHARS:
            raise RequestError(
                f"{self.field}: after has {len(self.after)} characters, at most {MAX_AFTER_CHARS} are allowed",
                self.field,
            )
        self._check_choice()

    def _check_choice(self) -> None:
        choice = self.choice
        if choice is None:
            return
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
            raise RequestError(
                f"{self.field}: choice must be a list of at least one string, given {shown(choice)}", self.field
            )
        if len(choice) > MAX_CHOICES:
            raise RequestError(
                f"{self.field}: choice has {len(choice)} strings, at most {MAX_CHOICES} are allowed", self.field
            )
        for text in choice:
            if not isinstance(text, str):
                raise RequestError(f"{self.field}: choice must have strings, given {shown(text)}", self.field)
