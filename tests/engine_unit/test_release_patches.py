"""The patches of the bad releases, which tests on real pods append to a module of the engine, fit today's engine."""

from __future__ import annotations

import importlib
from inspect import Parameter, signature
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "e2e" / "disruptions" / "bad_images"
REPLACED = {
    "fails_requests.py": ("rayloom_engine.front.openai.completions", "", "completions"),
    "fails_sequences.py": ("rayloom_engine.worker.runner", "Runner", "_sample"),
    "ten_times_slower.py": ("rayloom_engine.worker.runner", "Runner", "run"),
}
REPLACES_NO_FUNCTION = {"crashes_at_start.py", "next_version.py"}


def kinds(function: object) -> list[Parameter]:
    """Returns the parameters without names and types."""
    parameters = signature(function).parameters.values()  # type: ignore[arg-type]
    return [Parameter("p", each.kind) for each in parameters]


def test_each_patch_is_checked() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == REPLACED.keys() | REPLACES_NO_FUNCTION


@pytest.mark.parametrize("patch", REPLACED)
def test_the_replacement_has_the_parameters_of_the_replaced_function(
    patch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_name, owner, name = REPLACED[patch]
    module = importlib.import_module(module_name)
    names = dict(vars(module))
    if owner:
        before = getattr(names[owner], name)
        monkeypatch.setattr(names[owner], name, before)  # undoes the change of the patch after the test
    else:
        before = names[name]
    exec(compile((FOLDER / patch).read_text(), patch, "exec"), names)
    after = getattr(names[owner], name) if owner else names[name]
    assert after is not before
    assert kinds(after) == kinds(before)
