"""The repository's layout: no folder or module of ours stands in the way of Python's own, and starts stay light."""

import subprocess
import sys
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


@pytest.mark.parametrize(
    "module",
    [
        "rayloom_engine.__main__",
        "rayloom_engine.supervisor.supervisor",
        "rayloom_engine.front.__main__",
        "rayloom_engine.core_server.process",
        "rayloom_engine.launcher.__main__",
        "rayloom_engine.worker.process",
        "rayloom_operator.__main__",
        "rayloom_bench.command",
    ],
)
def test_the_start_imports_nothing_heavy(module):
    heavy = {"torch", "transformers", "ray", "triton", "numpy", "kopf", "kubernetes"}
    printed = run_python(f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))")

    assert printed.split() == []
