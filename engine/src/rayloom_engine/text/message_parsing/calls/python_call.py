"""A call as Python writes it: get_weather(city="Paris", days=3)."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from rayloom_engine.text.message_parsing.incoming import IncomingText, NoCall, Reading, blanks
from rayloom_engine.text.message_parsing.sink import PartSink

MAX_CALL_CHARS = 65536  # the most characters of a call: parsing this many brackets and commas takes 100 ms
MAX_DEPTH = 32  # limit for the nesting of brackets
_NAME = re.compile(r"[\w.-]{1,64}\(", re.ASCII)
_OPEN_NAME = re.compile(r"[\w.-]{0,64}", re.ASCII)
_STRING_RUN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_ARGUMENT = re.compile(r"\s*([^\s=*\"']+)\s*=(.*)", re.DOTALL)
_PIECE = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\[\](){},'"]+|.""", re.DOTALL)
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
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
    arguments = _arguments(incoming.text[name.end() : finder.at - 1])
    incoming.at = finder.at
    incoming.release()
    sink.start(function)
    sink.arguments(arguments)


class _EndFinder:
    """Finds the bracket that closes a call, outside strings. Reads each character once."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._depth = 1
        self._quote = ""  # quote that ends the open string; empty outside strings
        self._is_escaped = False

    def find(self, text: str) -> bool:
        """Returns True once `at` is behind the closing bracket. Raises NoCall if brackets are nested too deeply."""
        while self._depth and self.at < len(text):
            if self._quote:
                self._string(text)
                continue
            char = text[self.at]
            if char in _STRING_RUN:
                self._quote = char
            self._depth += (char in "([{") - (char in ")]}")
            if self._depth > MAX_DEPTH:
                raise NoCall
            self.at += 1
        return self._depth == 0

    def _string(self, text: str) -> None:
        """Moves `at` behind the next escaped character, backslash or closing quote of the open string."""
        if self._is_escaped:
            self._is_escaped = False
            self.at += 1
            return
        run = _STRING_RUN[self._quote].match(text, self.at)
        assert run is not None
        self.at = run.end()
        if self.at == len(text):
            return
        if text[self.at] == "\\":
            self._is_escaped = True
        else:
            self._quote = ""
        self.at += 1


def _arguments(source: str) -> str:
    """Returns the keyword arguments of a call as a JSON object. `source`: the text between the call's brackets.

    A schema may name an argument as Python does not, such as `from` or `max-age`. So Python reads only the values.
    """
    try:
        values = {}
        for argument in _split(source):
            named = _ARGUMENT.fullmatch(argument)
            if named is None:
                raise NoCall
            values[named[1]] = _literal(named[2].strip())
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises ValueError for half of a surrogate pair
        return text
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NoCall from error


def _split(source: str) -> list[str]:
    """Returns the texts between the commas that are outside brackets and strings, without a blank one at the end."""
    arguments = []
    depth = 0
    start = 0
    for found in _PIECE.finditer(source):
        piece = found[0]
        depth += (piece in _OPENING) - (piece in _CLOSING)
        if piece == "," and depth == 0:
            arguments.append(source[start : found.start()])
            start = found.end()
    last = source[start:]
    return [*arguments, last] if last.strip() else arguments


def _literal(source: str) -> Any:
    """Returns the value of a literal. JSON comes first, because Python reads the escapes of its strings differently."""
    try:
        return json.loads(source)
    except ValueError:
        return _value(ast.parse(source, mode="eval").body)


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
