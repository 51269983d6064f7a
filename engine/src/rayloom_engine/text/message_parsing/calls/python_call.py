"""A call as Python writes it: get_weather(city="Paris", days=3)."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from rayloom_engine.text.message_parsing.incoming import IncomingText, NoCall, Reading, blanks
from rayloom_engine.text.message_parsing.sink import PartSink

MAX_CALL_CHARS = 65536  # the most characters of a call: parsing this many brackets and commas takes 100 ms
MAX_DEPTH = 32  # limit for the nesting of brackets
_NAME = re.compile(r"[\w.-]{1,64}\(", re.ASCII)
_OPEN_NAME = re.compile(r"[\w.-]{0,64}", re.ASCII)
_STRING_RUN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_JSON_WORDS = {"true": True, "false": False, "null": None}


def python_call(incoming: IncomingText, sink: PartSink) -> Reading[None]:
    """Reads a call of one of the request's functions. The arguments are emitted once the call is complete."""
    yield from blanks(incoming)
    start = incoming.at
    while (name := _NAME.match(incoming.text, start)) is None:
        if incoming.is_ended or _OPEN_NAME.fullmatch(incoming.text, start) is None:
            raise NoCall
        yield
    function = name[0][:-1]
    if function not in sink.rules.schemas:
        raise NoCall
    finder = _EndFinder(name.end())
    while not finder.find(incoming.text):
        if incoming.is_ended or len(incoming.text) - start > MAX_CALL_CHARS:
            raise NoCall
        yield
    if finder.at - start > MAX_CALL_CHARS:
        raise NoCall
    arguments = _arguments(finder.arguments(incoming.text), sink.rules.schemas[function].get("properties"))
    incoming.at = finder.at
    incoming.release()
    sink.start(function)
    sink.arguments(arguments)


class _EndFinder:
    """Finds the bracket that closes a call, and the commas between its arguments. Reads each character once."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._ends = [at - 1]  # positions of the opening bracket and of what ends each argument
        self._depth = 1
        self._quote = ""  # quotes that end the open string; empty outside strings
        self._is_escaped = False

    def find(self, text: str) -> bool:
        """Returns True once `at` is behind the closing bracket. Raises NoCall if brackets are nested too deeply."""
        while self._depth and self.at < len(text):
            if self._quote:
                if not self._string(text):
                    return False
                continue
            char = text[self.at]
            if char in _STRING_RUN:
                if self.at + 3 > len(text):  # these may be the first of three quotes
                    return False
                self._quote = char * 3 if text.startswith(char * 3, self.at) else char
                self.at += len(self._quote)
                continue
            self._depth += (char in "([{") - (char in ")]}")
            if self._depth > MAX_DEPTH:
                raise NoCall
            if self._depth == 0 or (char == "," and self._depth == 1):
                self._ends.append(self.at)
            self.at += 1
        return self._depth == 0

    def arguments(self, text: str) -> list[str]:
        """Returns the texts of the arguments, once `find` has returned True. A comma may follow the last argument."""
        if text[self._ends[-1]] != ")":
            raise NoCall
        arguments = [text[before + 1 : end] for before, end in itertools.pairwise(self._ends)]
        return arguments if arguments[-1].strip() else arguments[:-1]

    def _string(self, text: str) -> bool:
        """Moves `at` behind the next escaped character, backslash or quote in the open string, or behind its end.

        Returns False if more text is needed to see whether the string ends.
        """
        if self._is_escaped:
            self._is_escaped = False
            self.at += 1
            return True
        run = _STRING_RUN[self._quote[0]].match(text, self.at)
        assert run is not None
        self.at = run.end()
        if self.at == len(text):
            return True
        if text[self.at] == "\\":
            self._is_escaped = True
        elif text.startswith(self._quote, self.at):
            self.at += len(self._quote)
            self._quote = ""
            return True
        elif self.at + len(self._quote) > len(text):
            return False
        self.at += 1
        return True


def _arguments(arguments: list[str], properties: object) -> str:
    """Returns the keyword arguments of a call as a JSON object. `properties`: those of the function's schema.

    A schema may name an argument as Python does not, such as `from` or `max-age`. So Python reads only the values.
    """
    values: dict[str, Any] = {}
    try:
        for argument in arguments:
            key, _, value = argument.partition("=")
            key = key.strip()
            if not key.isidentifier() and not (isinstance(properties, Mapping) and key in properties):
                raise NoCall
            values[key] = _literal(value.strip())
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises ValueError for half of a surrogate pair
        return text
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NoCall from error


def _literal(source: str) -> Any:
    """Returns the value of a literal. JSON comes first, because Python reads the escapes of its strings differently."""
    try:
        return json.loads(source)
    except ValueError:
        # Inside brackets, a literal may continue on the next line. The unpacking fails unless they hold one value.
        [value] = _value(ast.parse(f"[{source}\n]", mode="eval").body)
        return value


def _value(node: ast.expr) -> Any:
    """Returns the value of a literal. Raises NoCall for anything that JSON cannot have."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    raise NoCall
