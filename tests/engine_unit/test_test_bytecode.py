"""The bytecode that a run writes before its processes start equals the bytecode that pytest would write."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc

from rt_bytecode import files_without_bytecode, write_each


def test_pytest_reads_the_bytecode_with_rewritten_assertions(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    file = tmp_path / "folder" / "test_one.py"
    file.parent.mkdir()
    file.write_text("def test_one(): assert 1 == 2")
    (file.parent / "rt_helper.py").write_text("assert True")  # pytest rewrites no helpers
    assert files_without_bytecode([tmp_path]) == [file]

    write_each(pytestconfig, [file])

    assert files_without_bytecode([tmp_path]) == []
    bytecode = file.parent / "__pycache__" / f"test_one{PYC_TAIL}"
    code = _read_pyc(file, bytecode)
    assert code is not None and "@pytest_ar" in code.co_names
    file.write_text("def test_one(): assert 1 == 3")
    assert _read_pyc(file, bytecode) is None, "pytest rewrites a file that has changed since"
