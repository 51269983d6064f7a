"""Translates GBNF, the grammar syntax of llama.cpp, to Lark.

The translation makes one pass over the text and one pass over the rules, so its time grows with the text's length. If a
rule refers to no recursive rule, it becomes a terminal: llguidance then matches the rule with a regular expression.
https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError

_IS_GBNF = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*)
      | (?P<rule>[A-Za-z0-9_-]+)\s*::=
      | (?P<name>[A-Za-z0-9_-]+)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<chars>\[(?:[^\]\\\n]|\\.)*\])
      | (?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
      | (?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
_MAX_NESTING = 100  # the most parentheses inside each other


@dataclass(slots=True)
class _Rule:
    """A rule. Each token is a plain string: tens of thousands of token objects would start the garbage collector."""

    name: str
    # Tokens in Lark's syntax. A blank precedes each token except operators and references. A reference is the name of
    # the rule in GBNF, until `_body` replaces it.
    parts: list[str] = field(default_factory=list)
    references: list[int] = field(default_factory=list)  # indices of the parts that refer to a rule
    names: set[str] = field(default_factory=set)  # rules that this rule refers to


def is_gbnf(text: str) -> bool:
    """True if the grammar is written in GBNF: it has a rule with `::=`."""
    return _IS_GBNF.search(text) is not None


def lark_of_gbnf(text: str) -> str:
    """Returns the grammar in Lark's syntax. Raises RequestError if it is not GBNF."""
    rules = _rules_of(text)
    if "root" not in rules:
        raise RequestError("the GBNF grammar has no rule root, with which the answer begins; add it")
    for rule in rules.values():
        missing = rule.names - rules.keys()
        if missing:
            raise RequestError(f"the GBNF grammar has no rule {shown(min(missing))}, which {rule.name} refers to")
    terminals = _terminals(rules)
    names = {
        name: "start" if name == "root" else f"{'T' if name in terminals else 'r'}{number}"
        for number, name in enumerate(rules)
    }
    return "\n".join(f"{names[name]}: {_body(rule, names)}" for name, rule in rules.items())


def _rules_of(text: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    rule: _Rule | None = None
    position = 0
    nesting = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise RequestError(f"the GBNF grammar has {shown(text[position : position + 20])}, which is not GBNF")
        position = found.end()
        kind = found.lastgroup or ""
        token = found[kind]
        if kind == "blank":
            continue
        if kind == "rule":
            if token in rules:
                raise RequestError(f"the GBNF grammar has two rules {shown(token)}; rename one")
            rule = rules[token] = _Rule(token)
            continue
        if rule is None:
            raise RequestError(f"the GBNF grammar begins with {shown(token)}; begin it with a rule, as root ::= ...")
        # Parentheses in strings do not count: a string is one token, which begins with a quote.
        nesting += (token == "(") - (token == ")")
        if nesting > _MAX_NESTING:
            raise RequestError(f"the GBNF grammar has more than {_MAX_NESTING} parentheses inside each other")
        if kind == "name":
            rule.names.add(token)
            rule.references.append(len(rule.parts))
        rule.parts.append(_part(kind, token))
    return rules


def _part(kind: str, token: str) -> str:
    """Returns a token in Lark's syntax. A reference stays as it is."""
    if kind == "name":
        return token
    if kind == "chars":
        return f" /{_char_class(token)}/"
    if kind == "string":
        return f" {_string(token)}"
    if kind == "times" or token in "*+?":  # Lark requires an operator directly after its operand, without a blank
        return re.sub(r"\s", "", token)
    return " /./" if token == "." else f" {token}"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Returns the names of the rules that lead to no recursive rule. `root` is never a terminal."""
    referrers: dict[str, list[str]] = {name: [] for name in rules}
    num_open = {}
    for name, rule in rules.items():
        num_open[name] = len(rule.names)
        for other in rule.names:
            referrers[other].append(name)
    ready = [name for name, num in num_open.items() if num == 0]
    terminals = set()
    while ready:
        name = ready.pop()
        terminals.add(name)
        for referrer in referrers[name]:
            num_open[referrer] -= 1
            if num_open[referrer] == 0:
                ready.append(referrer)
    return terminals - {"root"}


def _body(rule: _Rule, names: dict[str, str]) -> str:
    for index in rule.references:
        rule.parts[index] = f" {names[rule.parts[index]]}"
    return "".join(rule.parts).lstrip() or '""'


def _string(token: str) -> str:
    r"""Returns a Lark string. Escapes of GBNF that JSON lacks, such as \x41, become characters or escapes of JSON."""
    return _ESCAPE.sub(lambda found: _json_escape(found[1]), token)


def _json_escape(escape: str) -> str:
    if escape[0] in "xuU" and len(escape) > 1:
        code = int(escape[1:], 16)
        return chr(code) if 0x20 <= code <= 0x10FFFF and chr(code) not in '"\\' else f"\\u{code:04x}"
    return f"\\{escape}" if escape in 'nrt"\\bf/' else escape


_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)")


def _char_class(token: str) -> str:
    """Returns a class of characters as the regular expression to write between Lark's slashes."""

    def regex_escape(found: re.Match[str]) -> str:
        escape = found[1]
        if escape[0] in "xuU" and len(escape) > 1:
            return f"\\x{{{escape[1:]}}}"
        return f"\\{escape}"

    body = token[1:-1]
    negation = "^" if body.startswith("^") else ""
    body = re.sub(
        r"\\\\|\\.|[/\[&~]", lambda found: found[0] if found[0][0] == "\\" else f"\\{found[0]}", body[len(negation) :]
    )
    return f"[{negation}{_ESCAPE.sub(regex_escape, body)}]"
