"""The repository's layout: no name hides a Python module, tests have no import circles, processes import little.

Import directions inside the products are contracts of import-linter, in pyproject.toml.
"""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from print_lines import lines_of_code

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "engine" / "src", ROOT / "operator" / "src", ROOT / "bench" / "src")

# Folders from which test code and tools are imported. Each folder comes before the folders that contain it.
IMPORT_ROOTS = tuple(ROOT / name for name in ("tests/support", "e2e", "tools", "bench/operator", "."))


def our_files():
    """Every Python file of the repository, without files that tools and builds have left."""
    for name in ("engine", "operator", "bench", "tests", "tools", "docker", "charts", "e2e"):
        yield from (path for path in (ROOT / name).rglob("*.py") if "build" not in path.relative_to(ROOT).parts)


def run_python(code):
    """Returns the output of a new interpreter that has the repository's root first on its path."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def module_names(paths, roots):
    """File -> the name under which it is imported, relative to the first root that contains it."""
    names = {}
    for path in paths:
        root = next(root for root in roots if path.is_relative_to(root))
        names[path] = ".".join(path.relative_to(root).with_suffix("").parts)
    return names


def statements(tree):
    """Every statement of a module. The search skips expressions, because they are most of a tree and import nothing."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, blocks, ())


def import_graph(paths, roots):
    """Module -> imported modules among these files.

    Imports within functions, and imports only for types, count as well.
    """
    names = module_names(paths, roots)
    known = set(names.values())
    graph = {}
    for path, name in names.items():
        imported = set()
        for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = imported & known
    return graph


def folder_graph(graph):
    """Folder -> the other folders that its modules import."""
    folders = {}
    for name, imported in graph.items():
        folder = name.rpartition(".")[0]
        others = folders.setdefault(folder, set())
        others |= {other.rpartition(".")[0] for other in imported} - {folder}
    return folders


def circle(graph):
    """The nodes of an import circle in order, the first node again at the end; empty if there is no circle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@functools.cache  # to parse every file takes seconds
def graph_outside_the_products():
    paths = [path for path in our_files() if not any(path.is_relative_to(source) for source in SOURCES)]
    return import_graph(paths, IMPORT_ROOTS)


def test_test_code_and_tools_have_no_import_circle():
    graph = graph_outside_the_products()

    assert "observers.timeline" in graph["observers.rollout_timeline"], "the graph holds the imports of e2e/"
    assert circle(graph) == []
    assert circle(folder_graph(graph)) == []


def test_no_helper_imports_a_conftest():
    importers = {
        name for name, imported in graph_outside_the_products().items() if any("conftest" in each for each in imported)
    }

    assert importers == set()


def test_an_import_circle_is_found(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "first.py").write_text("from two.second import something\n")
    (tmp_path / "two" / "second.py").write_text("def later():\n    from one import first\n")
    (tmp_path / "two" / "third.py").write_text("import two.second\n")
    graph = import_graph(sorted(tmp_path.rglob("*.py")), (tmp_path,))

    assert graph["two.third"] == {"two.second"}
    assert set(circle(graph)) == {"one.first", "two.second"}
    assert set(circle(folder_graph(graph))) == {"one", "two"}


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


def test_make_sanitize_names_every_file_with_tests_for_sanitizers():
    (command,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pytest -m sanitizers" in line]
    named = {word for word in command.split() if word.endswith(".py")}
    marked = {path for path in our_files() if re.search(r"\bmark\.sanitizers\b", path.read_text(encoding="utf-8"))}

    assert {str(path.relative_to(ROOT)) for path in marked} == named


def test_lines_of_code_are_those_without_blanks_comments_and_docstrings():
    source = '''"""A module.

Of two paragraphs.
"""

# A comment.
def add(a, b):  # one more
    """Returns the sum."""
    text = """a string
    of two lines"""
    return a + b
'''

    assert lines_of_code(source) == 4


# Process -> packages and modules that it must not import at its start, because it needs them later or never. The start
# of a front is part of every recovery, and imports are most of the start of a core.
HEAVY = {"torch", "transformers", "ray", "triton", "numpy", "kopf", "kubernetes"}
OF_A_DOCUMENT = {"fastapi", "rayloom_engine.front.document.openapi"}
OF_A_FRONT = OF_A_DOCUMENT | {"uvicorn", "tokenizers", "jinja2"}
# An interpreter imports the modules of a row one after the other, because they share most of their imports.
UNNEEDED = {
    "rayloom_engine.__main__": OF_A_FRONT | {"pydantic", "argparse", "logging", "asyncio"},  # before the core starts
    "rayloom_engine.cli.commands": OF_A_FRONT,
    "rayloom_engine.supervisor.supervisor": OF_A_FRONT | {"msgspec", "asyncio", "llguidance"},
    "rayloom_engine.front.process rayloom_engine.front.gateway.process": (
        OF_A_DOCUMENT | {"llguidance", "huggingface_hub"}
    ),
    "rayloom_engine.core_server.process rayloom_engine.launcher.__main__ rayloom_engine.worker.process": (
        OF_A_FRONT | {"llguidance"}
    ),
    "rayloom_operator.__main__": {"rayloom_operator.cli.plan", "rayloom_operator.decide.situation"},
    "rayloom_bench.command rayloom_bench.peers.command": set(),
}


@pytest.mark.parametrize("modules", UNNEEDED)
def test_the_start_imports_nothing_that_is_needed_later_or_never(modules):
    unneeded = HEAVY | UNNEEDED[modules]
    code = "".join(
        f"import {module}; print({module!r}, sorted({unneeded!r} & set(sys.modules)));" for module in modules.split()
    )

    assert run_python(f"import sys; {code}") == "".join(f"{module} []\n" for module in modules.split())


def test_the_front_imports_the_writer_of_metrics_with_the_first_scrape():
    start = "import sys, rayloom_engine.front.process; from rayloom_engine.front.operations.metrics import Metrics"
    seen = "print('prometheus_client' in sys.modules)"

    assert run_python(f"{start}; {seen}; Metrics('m').text(); {seen}").split() == ["False", "True"]
