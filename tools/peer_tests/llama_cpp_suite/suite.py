"""The tests of llama.cpp's server, for our server and for llama.cpp's, on the same weights."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from peer_tests.common.column import Column
from peer_tests.common.environment import client_python
from peer_tests.common.suite import Place, Suite
from peer_tests.common.weights import DEFAULT_MAX_TOKENS, limited_checkpoint
from peer_tests.llama_cpp_suite.exceptions import EXCEPTIONS, NOT_APPLICABLE
from rayloom_bench.machine import processor_name
from rayloom_bench.peers.engines import gguf_weights, llama_cpp

NAME = "llama.cpp"
TEST_SECONDS = 300
FILES = (
    "unit/test_basic.py",
    "unit/test_chat_completion.py",
    "unit/test_compat_anthropic.py",
    "unit/test_compat_oai_responses.py",
    "unit/test_completion.py",
    "unit/test_security.py",
    "unit/test_stream.py",
    "unit/test_tool_call.py",
)


def llama_cpp_suite() -> Suite:
    return Suite(
        name=NAME,
        version=f"{llama_cpp.VERSION}-max-tokens-{DEFAULT_MAX_TOKENS}",
        files=FILES,
        column=_column,
        not_applicable=NOT_APPLICABLE,
        exceptions=EXCEPTIONS,
    )


def _column(server: str, files: Sequence[str], place: Place) -> Column:
    num_jobs = len(os.sched_getaffinity(0))
    folder = llama_cpp.install(place.cache, processor=processor_name(), num_jobs=num_jobs, log=place.log)
    sources = folder / f"llama_cpp_python-{llama_cpp.VERSION}" / "vendor" / "llama.cpp"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = llama_cpp.environment(os.environ) | {
        "PEER_TESTS_SERVER": server,
        "PEER_TESTS_ENGINE": str(Path(sys.executable).with_name("rayloom-engine")),
        "PEER_TESTS_WEIGHTS": str(limited_checkpoint(place.cache)),
        "PEER_TESTS_GGUF": str(gguf_weights.weights(place.cache, log=place.log)["bf16"]),
        "LLAMA_SERVER_BIN_PATH": str(folder / "build" / "bin" / "llama-server"),
        "PORT": str(port),
    }
    return Column(
        python=client_python(place.cache, log=place.log),
        root=sources / "tools" / "server" / "tests",
        files=files,
        plugins=["peer_tests.llama_cpp_suite.plugin"],
        variables=variables,
        results=place.results_of(server),
        test_seconds=TEST_SECONDS,
        words=["-m", "not slow"],  # the slow tests download models of their own
    )
