"""The words of the sources: docstrings begin with a subject, and class names have one meaning.

The sources do not contain the words "for ever": a docstring names the event that ends a loop or a wait.
"""

import ast
import functools
import re
from collections import Counter, defaultdict
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
# Searches in the text of a file: each docstring that begins with a question word matches the first pattern, and each
# class matches the second.
STRING_WITH_QUESTION = re.compile(r"""["'][\s\\]*(What|Who|Whom|Whose|Which|Whether)\b""")
FOR_EVER = re.compile(r"\bfor(\s|#)+ever\b")
CLASS = re.compile(r"\bclass\s+(\w+)")


@functools.cache
def sources(product):
    """Path -> text of each source file."""
    paths = sorted((ROOT / product / "src").rglob("*.py"))
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


@functools.cache
def tree_of(product, path):
    return ast.parse(sources(product)[path])


def trees(product, is_candidate):
    """(path, syntax tree) of each file whose text `is_candidate` accepts. To parse every file would take seconds."""
    return [(path, tree_of(product, path)) for path, text in sources(product).items() if is_candidate(text)]


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0]


def question_docstrings(tree):
    """(line, first line of the docstring) of each docstring that begins with a question word."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and QUESTION.match(docstring := ast.get_docstring(node) or ""):
            yield getattr(node, "lineno", 1), docstring.splitlines()[0]


def test_the_check_finds_a_question_word_at_the_beginning_of_a_docstring_alone():
    def is_found(docstring):
        source = f"def run():\n    {docstring}\n"
        is_candidate = STRING_WITH_QUESTION.search(source) is not None
        found = list(question_docstrings(ast.parse(source)))
        assert is_candidate or not found, "the check would not parse this file"
        return bool(found)

    assert is_found('"""Whether it runs."""')
    assert is_found("r'Which one runs.'")
    assert is_found('"""\n    Who may write."""')
    assert is_found('"""\\\n    Who may write."""')
    assert not is_found('"""Returns whether it runs."""')
    assert not is_found('"""Whichever is first."""')


@pytest.mark.parametrize("product", PRODUCTS)
def test_no_docstring_begins_with_a_question_word(product):
    found = [
        f"{path}:{line}: {docstring}"
        for path, tree in trees(product, STRING_WITH_QUESTION.search)
        for line, docstring in question_docstrings(tree)
    ]
    assert found == []


@pytest.mark.parametrize("product", PRODUCTS)
def test_no_text_says_for_ever(product):
    """Nothing runs so long. A text names the end instead: of the process, of a task, or of a limit."""
    assert [str(path) for path, text in sources(product).items() if FOR_EVER.search(text)] == []


@pytest.mark.parametrize("product", PRODUCTS)
def test_no_class_name_is_defined_twice_in_a_product(product):
    times_written = Counter(name for text in sources(product).values() for name in CLASS.findall(text))
    places = defaultdict(list)
    for path, tree in trees(product, lambda text: any(times_written[name] > 1 for name in CLASS.findall(text))):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    assert times_written, "the search finds classes"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_module_that_is_called_pure_imports_neither_clock_nor_chance_nor_machine(product):
    found = {
        str(path): impure
        for path, tree in trees(product, PURE.search)
        if PURE.search(ast.get_docstring(tree) or "") and (impure := IMPURE & set(imported_modules(tree)))
    }
    assert found == {}
