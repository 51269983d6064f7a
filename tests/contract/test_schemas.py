"""The schemas in `schemas/` are those that the code generates."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tool():
    spec = importlib.util.spec_from_file_location("write_schemas", ROOT / "tools" / "write_schemas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


@pytest.mark.parametrize("name", TOOL.SCHEMAS)
def test_the_schema_file_is_current(name):
    written = (ROOT / "schemas" / name).read_text(encoding="utf-8")

    assert written == TOOL.schema_text(TOOL.SCHEMAS[name]), f"schemas/{name} is not current; run: make schemas"


def test_no_schema_file_is_left_over():
    assert {path.name for path in (ROOT / "schemas").iterdir()} == set(TOOL.SCHEMAS)
