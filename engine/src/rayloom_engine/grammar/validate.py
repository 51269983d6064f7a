"""Checks whether llguidance can enforce a grammar, before a request is accepted."""

from __future__ import annotations

import asyncio
import functools
import re
from concurrent.futures import ThreadPoolExecutor

from rayloom_engine.errors import RequestError
from rayloom_engine.grammar.deep_stack import deep_stack_pool
from rayloom_engine.grammar.llguidance_limits import parser_limits

# Beginning of llguidance's message about a JSON schema. It names a place in the grammar around the schema, which
# compile.py wrote.
_JSON_SCHEMA = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_MAX_MESSAGE = 500  # the most characters of llguidance's message in an error
_MAX_KNOWN = 128  # the most results that are cached; a grammar has at most 64 KB


class GrammarRefused(RequestError):
    """llguidance cannot enforce the grammar. The message contains llguidance's message."""


_known: dict[str, tuple[str, ...] | str] = {}  # grammar -> warnings, or the message of the refusal; oldest first


async def validate(grammar: str, field: str) -> tuple[str, ...]:
    """Returns llguidance's warnings about a grammar. Raises GrammarRefused.

    llguidance reads a new grammar in a thread and releases the interpreter lock, so that the event loop continues.
    """
    known = _known.get(grammar)
    if known is None:
        known = await asyncio.wrap_future(_pool().submit(_remember, grammar))
    return _warnings(known, field)


def validate_here(grammar: str, field: str) -> tuple[str, ...]:
    """Returns the same as `validate`, for code without an event loop."""
    known = _known.get(grammar)
    if known is None:
        known = _pool().submit(_remember, grammar).result()
    return _warnings(known, field)


def is_known(grammar: str) -> bool:
    """True if the result of `validate` for this grammar is cached."""
    return grammar in _known


def _warnings(known: tuple[str, ...] | str, field: str) -> tuple[str, ...]:
    if isinstance(known, str):
        raise GrammarRefused(f"{field} cannot be enforced: {known}", field)
    return known


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return deep_stack_pool("grammars")


def _remember(grammar: str) -> tuple[str, ...] | str:
    known = _known.get(grammar)
    if known is None:
        known = _known[grammar] = _asked(grammar)
    while len(_known) > _MAX_KNOWN:
        del _known[next(iter(_known))]
    return known


def _asked(grammar: str) -> tuple[str, ...] | str:
    from llguidance import LLMatcher  # The import takes 50 ms, so it happens with the first grammar and in the thread.

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    # Names and ids of special tokens are checked where the grammar is used, with the model's vocabulary.
    messages = [shortened(message) for message in messages if not message.startswith("no tokenizer")]
    return messages[0] if is_error else tuple(messages)


def shortened(message: str) -> str:
    """Returns llguidance's message in one line, without the excerpt of the grammar or the backtrace after it."""
    words = message.partition("<backtrace>")[0].strip().partition("\n   1 |")[0]
    first = _JSON_SCHEMA.sub("", words)
    line = " ".join(first.split())
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 3] + "..."
