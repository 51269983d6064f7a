"""Grammars of tool calls in llguidance's Lark syntax, for each tool format. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rayloom_engine.grammar.closed_schemas import closed
from rayloom_engine.text.message_parsing.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START
from rayloom_engine.text.message_parsing.tool_formats import HARMONY, MISTRAL, ToolFormat
from rayloom_engine.text.tools.call_rules import (
    ANY_TEXT,
    BLANKS,
    grammar,
    json_rule,
    keyword_arguments,
    lazy_text,
    quoted,
    sequence,
    tagged_arguments,
)
from rayloom_engine.text.tools.tool import Tool, ToolUse

MAX_CALLS = 16  # the most calls of an answer; without a limit, a weak model would repeat calls up to max_tokens
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def call_grammar(
    use: ToolUse, format: ToolFormat, special_ids: Mapping[str, int], *, is_after_reasoning: bool = False
) -> str | None:
    """Returns the grammar that answers must follow; None if answers may have any text.

    `is_after_reasoning`: the grammar begins behind the tag that ends the reasoning. Models write line ends after this
    tag. `special_ids`: tag -> token id, for the tags that are special tokens of the model. Forced calls follow the
    schemas of their tools. A call that the model chooses follows the schema only if the tool is strict.
    """
    if use.mode == "none" or not (use.is_forced or any(tool.is_strict for tool in use.callable)):
        return None
    made = _Grammar(use, format, special_ids, BLANKS if is_after_reasoning else "")
    return made.forced() if use.is_forced else made.chosen()


def calls_or_form(
    use: ToolUse, format: ToolFormat, special_ids: Mapping[str, int], form: str, *, is_after_reasoning: bool = False
) -> str:
    """Returns the grammar of answers that consist of calls, or that follow the grammar `form`."""
    made = _Grammar(use, format, special_ids, BLANKS if is_after_reasoning else "")
    start, *rules = made.forced().splitlines()
    either = f"start: calls | other\ncalls: {start.removeprefix('start: ')}"
    return "\n".join((either, *rules, form.replace("start: ", "other: ", 1))) + "\n"


class _Grammar:
    def __init__(self, use: ToolUse, format: ToolFormat, special_ids: Mapping[str, int], before: str) -> None:
        """`before`: the expression of the text before the first call or content."""
        self._use = use
        self._format = format
        self._special_ids = special_ids
        self._before = before
        self._is_single = use.mode == "named" or not use.is_parallel or format is HARMONY

    def forced(self) -> str:
        """Returns a grammar for answers with only calls. In the harmony format, reasoning may precede the calls."""
        rules = self._call_rules()
        if self._format is HARMONY:
            analysis = sequence(self._tag(CHANNEL), quoted("analysis"), self._tag(MESSAGE), "thoughts")
            reasoning = f"reasoning: {sequence(analysis, self._tag(START), quoted('assistant'))}"
            return grammar("reasoning? call", reasoning, *self._text_until("thoughts", END), *rules)
        if self._has_shared_opener:
            return grammar(sequence(self._before, self._opener, self._calls()), *rules)
        tagged = f"tagged: {sequence(self._opener, self._calls())}"
        between = quoted("\n") if self._format.closers else ""
        more = self._more(sequence(between, "tagged"))
        return grammar(sequence(self._before, f"tagged{more}"), tagged, *rules)

    def chosen(self) -> str | None:
        """Returns a grammar for answers with any text. Each call in the text follows its schema from the opener on."""
        rules = self._call_rules()
        if self._format is HARMONY:
            return None  # headers of harmony's messages may have many forms
        if self._format.first_openers:
            first = "".join(self._format.first_openers)
            return grammar(
                sequence(self._before, f"({self._calls()} | FREE)"), rf"FREE: /([^\{first}](.|\n)*)?/", *rules
            )
        opener = self._format.openers[0]
        head = self._text_until("head", opener)
        return grammar(f"({sequence('head', self._calls())})* REST", *head, f"REST: {ANY_TEXT}", *rules)

    @property
    def _has_shared_opener(self) -> bool:
        """True if at most one opener precedes all calls; False if each call has its own opener."""
        return bool(self._format.separators or self._is_list)

    @property
    def _is_list(self) -> bool:
        return self._format.is_list and not self._is_named

    @property
    def _is_named(self) -> bool:
        """True if calls have the newer form of Mistral's models, whose tag between name and arguments is a token."""
        return self._format is MISTRAL and "[ARGS]" in self._special_ids

    @property
    def _opener(self) -> str:
        openers = () if self._format.first_openers else self._format.openers
        return self._tag(openers[0]) if openers else ""

    def _calls(self) -> str:
        """Returns the grammar expression for the calls, without the tag that opens the first call."""
        if self._is_list:
            return sequence(quoted("["), "call" + self._more('", " call'), quoted("]"))
        if self._format.separators:
            return "call" + self._more(sequence(quoted(f"{self._format.separators[0]} "), "call"))
        if self._format.closers:
            return sequence(quoted("\n"), "call", quoted("\n"), self._tag(self._format.closers[0]))
        return "call"

    def _more(self, expression: str) -> str:
        return "" if self._is_single else f" ({expression}){{0,{MAX_CALLS - 1}}}"

    def _tag(self, text: str) -> str:
        """Returns the grammar expression of a tag: a single token, several tokens, or a text."""
        token_id = self._special_ids.get(text)
        if token_id is not None:
            return f"<[{token_id}]>"
        first = next((part for part in self._format.parts if part in self._special_ids and text.startswith(part)), None)
        if first is None:
            return quoted(text)
        return sequence(self._tag(first), self._tag(text.removeprefix(first)))

    def _text_until(self, rule: str, tag: str) -> list[str]:
        """Returns the rules of a text that ends with the first `tag`."""
        if self._tag(tag) != quoted(tag):
            return [f"{rule}: TEXT {self._tag(tag)}", f"TEXT: {ANY_TEXT}"]
        return [lazy_text(rule, tag)]

    def _call_rules(self) -> list[str]:
        names = [f"call_{number}" for number in range(len(self._use.callable))]
        rules = [f"call: {' | '.join(names)}"]
        for name, tool in zip(names, self._use.callable, strict=True):
            has_schema = self._use.is_forced or tool.is_strict
            rules += self._rules_of(name, tool, closed(tool.parameters) if has_schema else ANY_OBJECT)
        return rules

    def _rules_of(self, rule: str, tool: Tool, schema: Mapping[str, Any]) -> list[str]:
        if self._format.syntax == "xml":
            return tagged_arguments(rule, tool.name, schema, is_strict=tool.is_strict)
        if self._format.syntax == "python":
            return keyword_arguments(rule, tool.name, schema, is_strict=tool.is_strict)
        arguments = f"{rule}_arguments"
        if self._format is HARMONY:
            header = sequence(self._tag(CHANNEL), quoted(f"commentary to=functions.{tool.name} "), self._tag(CONSTRAIN))
            call = sequence(header, quoted("json"), self._tag(MESSAGE), arguments)
        elif self._is_named:
            call = sequence(quoted(tool.name), self._tag("[ARGS]"), arguments)
        else:
            begin = f'{{"name": {json.dumps(tool.name)}, "{self._format.arguments_key}": '
            call = sequence(quoted(begin), arguments, quoted("}"))
        return [f"{rule}: {call}", json_rule(arguments, schema, is_strict=tool.is_strict)]
