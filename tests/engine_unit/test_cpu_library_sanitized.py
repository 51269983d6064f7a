"""The tests of the C library run once more, with a library that checks addresses and undefined behaviour.

The library is compiled with AddressSanitizer and UndefinedBehaviorSanitizer, and warnings are errors. The tests run in
a process that preloads the sanitizers, with every instruction set of this CPU. The first finding ends the process.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rayloom_engine.cpu_library.build import (
    build_library,
    cached_library,
    find_compiler,
    source_folder,
    unsupported_machine,
)
from rayloom_engine.models.checkpoint.source import cache_folder

COMPILER = find_compiler(os.environ)
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# Files that test servers or compilations instead of kernels, and this file.
OTHERS = {"test_cpu_backend.py", "test_cpu_library_build.py", Path(__file__).name}
KERNEL_TESTS = sorted(
    path for path in (*FOLDER.glob("test_cpu_*.py"), *FOLDER.glob("test_int8_*.py")) if path.name not in OTHERS
)
FLAGS = ("-O1", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = [
    pytest.mark.sanitizers,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(COMPILER is None or bool(unsupported_machine()), reason="there is no C++ compiler for x86-64"),
]


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    """The environment in which processes use a sanitized library, which is kept in the cache."""
    assert COMPILER is not None
    library = cached_library(cache_folder(os.environ), COMPILER, source_folder(), FLAGS)
    build_library(COMPILER, source_folder(), library, FLAGS)
    preloaded = [
        subprocess.run(
            [*shlex.split(COMPILER), f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python does not free all of its memory
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "RAYLOOM_CPU_LIBRARY": str(library),
        "OMP_NUM_THREADS": "1",
    }


def test_a_write_behind_a_buffer_is_found(environ: dict[str, str]) -> None:
    script = (
        "import ctypes, os; library = ctypes.CDLL(os.environ['RAYLOOM_CPU_LIBRARY']);"
        "malloc = ctypes.CDLL(None).malloc; malloc.restype = ctypes.c_void_p;"
        "rows = [ctypes.c_void_p(malloc(64)) for _ in range(2)];"
        "library.rl_choose(b'avx2');"
        "library.rl_add(*rows, None, ctypes.c_float(0), ctypes.c_float(1), 1, {count}); print('added')"
    )
    for count in (16, 17):
        command = [sys.executable, "-c", script.format(count=count)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert (done.stdout == "added\n") is (count == 16), done.stderr
        assert ("heap-buffer-overflow" in done.stderr and "rl_add" in done.stderr) is (count == 17), done.stderr


def test_the_kernels_have_neither_bad_addresses_nor_undefined_behaviour(environ: dict[str, str]) -> None:
    names = {path.name for path in KERNEL_TESTS}
    assert {
        "test_cpu_decoder.py",
        "test_cpu_decoder_batches.py",
        "test_cpu_sampler.py",
        "test_cpu_sinks.py",
        "test_int8_weights.py",
    } <= names
    # With --capture=sys, pytest captures only Python's own streams. So a sanitizer's report stays on stderr.
    flags = ["-q", "-x", "--capture=sys", "-o", "timeout=1700"]
    command = [sys.executable, "-m", "pytest", *flags, *map(str, KERNEL_TESTS)]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    finding = re.search(r"(runtime error|ERROR: AddressSanitizer).*", done.stderr, re.DOTALL)
    assert done.returncode == 0, finding[0][:4000] if finding else done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout.splitlines()[-1], done.stdout[-1000:]
