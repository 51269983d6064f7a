"""StructuredOutputs: the form that an answer must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayloom_engine.errors import RequestError

_FORMS = ("json", "json_object", "regex", "choice", "grammar", "lark")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one form. The names are those of vLLM's class, except `lark`.

    `after`: the form begins after this text, such as the tag that ends the model's reasoning; empty: with the answer.
    """

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema, as an object or as its text
    json_object: bool | None = None  # any JSON object
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # EBNF in GBNF's or Lark's syntax
    lark: str | None = None  # a grammar in llguidance's Lark syntax, as the tool parsers write it
    after: str = ""

    def __post_init__(self) -> None:
        """Raises RequestError if no form or more than one is given."""
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named = " and ".join(given) if given else "none"
            raise RequestError(
                f"structured_outputs must have exactly one of {', '.join(_FORMS[:-1])}, given {named}",
                "structured_outputs",
            )
