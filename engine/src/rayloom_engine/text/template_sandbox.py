"""TemplateSandbox: Jinja's sandbox, with a limit on time and on text for each rendering.

Jinja's sandbox blocks access to Python's internals, but limits neither the run time nor the memory of a template. In a
TemplateSandbox, each iteration of a loop, each call and each filter checks the time. No value may be larger than the
allowed output.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rayloom_engine.text.template_growth import check_percent, growth, weight

MAX_INTEGER_BITS = 10_000
MAX_REPEATED = 1_000_000  # the longest string or list that `*` may build
CHARS_AT_LOAD = 1_000_000  # the most characters of constant expressions, which Jinja computes when it compiles
_SPENDS_PER_CLOCK = 8  # calls of `spend` per reading of the clock; a reading costs more than an iteration

# Filters whose result has no more characters than their input, so the characters need not be counted.
_STRUCTURAL = frozenset(
    (
        "abs",
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "float",
        "int",
        "items",
        "last",
        "length",
        "list",
        "map",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "round",
        "safe",
        "select",
        "selectattr",
        "slice",
        "sum",
    )
)
_LEFT_OUT = ("urlize", "xmlattr")  # these filters write HTML


class TemplateTooSlow(SecurityError):
    """The rendering has used up its CPU time."""


class Budget:
    """Limits of one rendering: `cpu_s` seconds of its thread's CPU time, and `max_chars` characters in any value."""

    def __init__(self, cpu_s: float, max_chars: int) -> None:
        self.max_chars = max_chars
        self._cpu_s = cpu_s
        self._started_s = time.thread_time()
        self._num_spends = 0

    def spend(self) -> None:
        """Raises TemplateTooSlow if the time is used up. Called for each loop iteration, call and filter."""
        self._num_spends += 1
        if self._num_spends % _SPENDS_PER_CLOCK == 0 and time.thread_time() - self._started_s > self._cpu_s:
            raise TemplateTooSlow(f"it has computed for more than {self._cpu_s:g} s")

    def check_chars(self, num_chars: int) -> None:
        """Raises SecurityError for a value with too many characters."""
        if num_chars > self.max_chars:
            raise SecurityError(f"it makes a value of more than {self.max_chars} characters")

    def checked(self, value: Any) -> Any:
        """Returns `value`, the result of a call or filter. Raises SecurityError if it is too large."""
        if isinstance(value, str | bytes | list | tuple | dict):
            self.check_chars(len(value))
        return value

    def weigh(self, value: object) -> int:
        """Returns how many characters `value` has when it is written out. Raises SecurityError if too many."""
        num_chars = weight(value, self.max_chars)
        self.check_chars(num_chars)
        return num_chars


_budget: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextlib.contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Makes renderings in the `with` block use `budget`."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def _current() -> Budget:
    return _budget.get() or Budget(float("inf"), CHARS_AT_LOAD)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A jinja2 environment whose templates can use neither much time nor much memory.

    Render its templates within `with spending(...)`.
    """

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        self.globals.pop("lipsum")
        for name in _LEFT_OUT:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Adds `function` as a filter, with checks of the budget."""
        self.filters[name] = _bounded_filter(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = _Instrumented(self).visit(super()._parse(source, name, filename))
        return template

    @property
    def spent(self) -> None:
        """Spends from the budget: compiled templates read this property at the start of each iteration and macro.

        It is a property, because a call in the template would cost five times as much.
        """
        _current().spend()

    def joined(self, *values: Any) -> str:
        """Joins the values as texts, as the operator `~` does. Raises SecurityError if they are too long."""
        budget = _current()
        budget.weigh(values)
        return "".join(map(str, values))

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **named: Any) -> Any:
        budget = _current()
        budget.spend()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            name = obj.__name__
            if name == "join" and isinstance(owner, str | bytes) and args and not isinstance(args[0], str):
                args = (list(args[0]), *args[1:])  # An iterator becomes a list, because counting would exhaust it.
                budget.check_chars(budget.weigh(args[0]) + len(args[0]) * len(owner))
            budget.check_chars(growth(name, (owner, *args), named))
        return budget.checked(super().call(context, obj, *args, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded(*args: Any, **named: Any) -> str:
            budget = _current()
            check_percent(value.__self__, (*args, *named.values()))
            budget.weigh((value.__self__, args, named))
            text: str = budget.checked(formatted(*args, **named))
            return text

        return bounded

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                _current().check_chars(len(left) + len(right))
        elif operator == "%":
            if isinstance(left, str | bytes):
                check_percent(left, right)
                _current().weigh((left, right))
        else:
            _check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _check_product(operator: str, left: Any, right: Any) -> None:
    for sized, times in ((left, right), (right, left)):
        if isinstance(sized, str | list | tuple) and isinstance(times, int) and len(sized) * times > MAX_REPEATED:
            raise SecurityError(f"it repeats something {times} times")
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_INTEGER_BITS:
            raise SecurityError("it computes a number that is far too large")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Some filters get Jinja's context or environment as the first argument, before the value.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **named: Any) -> Any:
        budget = _current()
        budget.spend()
        if name == "join" and len(args) > first and not isinstance(args[first], str | Mapping):
            args = (*args[:first], list(args[first]), *args[first + 1 :])
        values = args[first:]
        if len(values) == 1 and not named and isinstance(values[0], str):
            num_chars = len(values[0])  # this text was given to the template, or is a value that was checked before
        elif name not in _STRUCTURAL:
            num_chars = budget.weigh((values, named))
            if name == "join":
                separator = (*values[1:], named.get("d", ""))[0]
                budget.check_chars(num_chars + len(values[0]) * len(str(separator)))
        budget.check_chars(growth(name, values, named))
        return budget.checked(function(*args, **named))

    return bounded


def _written(value: Any) -> Any:
    """Returns `value`, which `{{ value }}` writes. Raises SecurityError for too large lists and dicts."""
    if not isinstance(value, str):
        _current().weigh(value)
    return value


class _Instrumented(NodeTransformer):
    """Inserts a read of `spent` into each loop and macro, and replaces `~` by a call of `joined`."""

    def __init__(self, environment: TemplateSandbox) -> None:
        self._environment = environment

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._spends(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._spends(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._spends(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._call("joined", node.nodes, node)

    def _spends(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        spent = jinja2.nodes.EnvironmentAttribute("spent", lineno=node.lineno)
        statement = jinja2.nodes.ExprStmt(spent, lineno=node.lineno)
        node.body.insert(0, statement.set_environment(self._environment))
        found: jinja2.nodes.Node = node
        return found

    def _call(self, name: str, arguments: list[jinja2.nodes.Expr], at: jinja2.nodes.Node) -> jinja2.nodes.Call:
        function = jinja2.nodes.EnvironmentAttribute(name, lineno=at.lineno)
        call = jinja2.nodes.Call(function, arguments, [], None, None, lineno=at.lineno)
        call.set_environment(self._environment)
        return call
