"""Writes the bytecode of test files, with assertions rewritten by pytest, once for all processes of a run.

Otherwise, in a fresh checkout, each process would rewrite the assertions of all files, which takes 7 s of CPU time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _rewrite_test, _write_pyc, assertstate_key, get_cache_dir


def files_without_bytecode(folders: Sequence[Path]) -> list[Path]:
    """The test files and conftests in these folders whose bytecode pytest has never written."""
    found = [path for folder in folders for name in ("test_*.py", "conftest.py") for path in folder.rglob(name)]
    return sorted(path for path in found if not _bytecode_of(path).exists())


def write_bytecode(config: pytest.Config, files: Sequence[Path]) -> None:
    """Writes the bytecode of `files`, on all cores. pytest itself writes bytecode that is out of date or missing."""
    if sys.dont_write_bytecode:
        return
    num_processes = min(os.cpu_count() or 1, len(files))
    # The processes are forks, so that they need not import pytest or read its configuration.
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=write_each, args=(config, files[i::num_processes])) for i in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _bytecode_of(file: Path) -> Path:
    return get_cache_dir(file) / (file.stem + PYC_TAIL)


def write_each(config: pytest.Config, files: Sequence[Path]) -> None:
    """Writes the bytecode of `files` in this process."""
    for file in files:
        source_hash, code = _rewrite_test(file, config)
        bytecode = _bytecode_of(file)
        bytecode.parent.mkdir(exist_ok=True)
        _write_pyc(config.stash[assertstate_key], code, source_hash, bytecode)
