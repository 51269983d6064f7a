"""Each name that a bad release's patch replaces exists in the engine's code. Tests on pods use the images."""

import ast
from pathlib import Path

import pytest

from disruptions.releases import CRASHES, FAILS_REQUESTS, FOLDER, NEXT, SLOW

ENGINE = Path(__file__).resolve().parents[2] / "engine" / "src" / "rayloom_engine"


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def names_of(module):
    """Names that the statements of a module bind: functions, classes, variables and imports."""
    names = set()
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("release", [NEXT, CRASHES, FAILS_REQUESTS, SLOW], ids=lambda release: release.patch)
def test_a_patch_belongs_to_a_module_and_replaces_names_of_it(release):
    patch, module = parsed(FOLDER / release.patch), parsed(ENGINE / release.module)
    imported = {alias.name for node in patch.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    replaced = {name for name in names_of(patch) - imported if not name.startswith("_")}

    assert replaced <= names_of(module)
    assert replaced or any(isinstance(node, ast.Raise | ast.Assign) for node in patch.body)


def test_the_slow_release_replaces_a_method_that_the_engine_calls():
    runner = next(node for node in parsed(ENGINE / SLOW.module).body if getattr(node, "name", "") == "Runner")

    assert "run" in {node.name for node in runner.body if isinstance(node, ast.FunctionDef)}
