"""The words of the sources: docstrings begin with a subject, and class names have one meaning."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCTS = ("engine", "operator", "bench")

# A docstring begins with what the function does or returns. After a question word the reader would miss the subject.
QUESTION = re.compile(r"\s*(What|Who|Whom|Whose|Which|Whether)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A module whose docstring says "Pure." imports no module that reads clocks, random numbers or the machine.
IMPURE = frozenset(("asyncio", "httpx", "os", "random", "secrets", "socket", "subprocess", "threading", "time"))
PURE = re.compile(r"\bPure[.,]")


@functools.cache  # to parse every file takes seconds
def source_trees(product):
    paths = sorted((ROOT / product / "src").rglob("*.py"))
    return [(path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0]


def begins_with_a_question_word(docstring):
    return QUESTION.match(docstring) is not None


def test_the_check_finds_a_question_word_at_the_beginning_of_a_docstring_alone():
    assert begins_with_a_question_word("Whether it runs.")
    assert begins_with_a_question_word("\n    Who may write.")
    assert not begins_with_a_question_word("Returns whether it runs.")
    assert not begins_with_a_question_word("Whichever is first.")


@pytest.mark.parametrize("product", PRODUCTS)
def test_no_docstring_begins_with_a_question_word(product):
    found = [
        f"{path}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]}"
        for path, tree in source_trees(product)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED)
        and (docstring := ast.get_docstring(node))
        and begins_with_a_question_word(docstring)
    ]
    assert found == []


@pytest.mark.parametrize("product", PRODUCTS)
def test_no_class_name_is_defined_twice_in_a_product(product):
    places = defaultdict(list)
    for path, tree in source_trees(product):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_module_that_is_called_pure_imports_neither_clock_nor_chance_nor_machine(product):
    found = {
        str(path): impure
        for path, tree in source_trees(product)
        if PURE.search(ast.get_docstring(tree) or "") and (impure := IMPURE & set(imported_modules(tree)))
    }
    assert found == {}
