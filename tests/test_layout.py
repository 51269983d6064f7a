"""The repository's layout: no folder or module of ours stands in the way of Python's own, and starts stay light."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "engine" / "src", ROOT / "operator" / "src", ROOT / "bench" / "src")


def our_files():
    """Every Python file of the repository, without what tools and builds have left there."""
    for name in ("engine", "operator", "bench", "tests", "tools", "docker", "charts", "e2e"):
        yield from (path for path in (ROOT / name).rglob("*.py") if "build" not in path.relative_to(ROOT).parts)


def run_python(code):
    """What a new interpreter prints that has the repository's root first on its path."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_standard_library_is_not_shadowed_from_the_root():
    printed = run_python("import operator, types, collections; print(operator.__file__)")

    assert Path(printed.strip()).name == "operator.py"
    assert not Path(printed.strip()).resolve().is_relative_to(ROOT)


def test_no_package_outside_the_source_folders():
    found = [path for path in our_files() if path.name == "__init__.py"]

    assert found, "the search finds the packages themselves"
    assert [path for path in found if not any(path.is_relative_to(source) for source in SOURCES)] == []


def test_no_module_has_the_name_of_one_of_the_standard_library():
    assert [path for path in our_files() if path.stem in sys.stdlib_module_names] == []


def test_no_source_file_is_longer_than_400_lines():
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in our_files()}

    assert {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > 400} == {}


def lines_of_code(source):
    """Lines with code, counted as cloc counts them: none that are blank, and none of comments and docstrings."""
    texts = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            texts |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            found |= set(range(token.start[0], token.end[0] + 1)) if token.string else set()
    return len(found - texts)


def test_lines_of_code_are_those_that_do_something():
    source = '"""What it is."""\n\n# Why.\ndef f():\n    """Gives\n    one."""\n    return """a\nb"""\n'

    assert lines_of_code(source) == 3


@pytest.mark.parametrize(("project", "budget"), [("engine", 12_000), ("operator", 6_700)])
def test_a_product_can_be_read_in_a_day(project, budget):
    files = (ROOT / project / "src").rglob("*.py")

    assert 1_000 < sum(lines_of_code(path.read_text(encoding="utf-8")) for path in files) < budget


@pytest.mark.parametrize(
    "module",
    [
        "rayloom_engine.__main__",
        "rayloom_engine.supervisor",
        "rayloom_engine.front.__main__",
        "rayloom_engine.core_process",
        "rayloom_engine.launcher.__main__",
        "rayloom_engine.rank_process",
        "rayloom_operator.__main__",
        "rayloom_bench.command",
    ],
)
def test_the_start_imports_nothing_heavy(module):
    heavy = {"torch", "transformers", "ray", "triton", "numpy", "kopf", "kubernetes"}
    printed = run_python(f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))")

    assert printed.split() == []
