"""`python -m peer_tests`: runs peers' tests of the API against our server and against the peers, and compares."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from peer_tests.common.column import forget_lost, run_column
from peer_tests.common.suite import RAYLOOM, Place, Suite
from peer_tests.comparison import Comparison, Result, compare, listed, read_results, table, unused
from peer_tests.llama_cpp_suite.suite import llama_cpp_suite
from peer_tests.sglang_suite.suite import sglang_suite
from peer_tests.vllm_suite.suite import vllm_suite
from rayloom_bench.peers.engines.installation import PeerMissing, peers_folder

SUITES = {suite.name: suite for suite in (vllm_suite(), sglang_suite(), llama_cpp_suite())}
PEER = "peer"
_REPEATS = 3  # how often tests that only the peer passes are repeated on our server


def main() -> int:
    options = _options()
    cache = peers_folder(os.environ)
    pages = []
    num_owed = 0
    for name in options.suites.split(","):
        suite = SUITES[name]
        results = (options.results or cache / "peer-test-results") / f"{suite.name}-{suite.version}"
        results.mkdir(parents=True, exist_ok=True)
        place = Place(cache=cache, results=results, log=_say)
        try:
            _run_columns(suite, place, options)
            _repeat_owed(suite, place, options)
        except PeerMissing as error:
            _say(str(error))
            return 1
        comparisons = _comparisons(suite, place, options.k)
        num_owed += sum(each.is_owed for each in comparisons)
        pages.append(_page(suite, comparisons))
        if not options.k and not options.files:
            for part in unused(suite.exceptions, comparisons):
                _say(f"{suite.name}: no test that only the peer passes is an exception by {part!r}")
    text = "\n\n".join(pages) + "\n"
    print(text)
    if options.page is not None:
        options.page.write_text(text, encoding="utf-8")
    return 1 if num_owed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="peer_tests", description=__doc__)
    parser.add_argument("--suites", default=",".join(SUITES), help=f"default: {','.join(SUITES)}")
    parser.add_argument("--servers", default=f"{RAYLOOM},{PEER}", help="which servers to test; others keep results")
    parser.add_argument("--files", nargs="*", help="test files, as in the tables; default: all of a suite")
    parser.add_argument("--results", type=Path, help="folder of the results; default: in the cache")
    parser.add_argument("-k", default="", help="only tests whose names match, as in pytest")
    parser.add_argument("--resume", action="store_true", help="keep our results of an interrupted run, too")
    parser.add_argument("--retry-lost", action="store_true", help="run tests again that lost their server")
    parser.add_argument("--needed", action="store_true", help="run on the peer only the tests that fail on our server")
    parser.add_argument("--page", type=Path, help="write the tables and the tests that are owed into this file")
    return parser.parse_args()


def _run_columns(suite: Suite, place: Place, options: argparse.Namespace) -> None:
    """Runs all tests on our server. Then runs, on the peer, the tests that have no result there, our failures first."""
    files: Sequence[str] = options.files or suite.files
    servers = options.servers.split(",")
    words = ("-k", options.k) if options.k else ()
    if options.retry_lost:
        num_lost = sum(forget_lost(place.results_of(server)) for server in servers)
        _say(f"{suite.name}: {num_lost} tests that lost their server run again")
    if RAYLOOM in servers:
        _say(f"{suite.name}: our server")
        run_column(suite.column(RAYLOOM, files, place), resume=options.resume, words=words)
    if PEER in servers and suite.has_peer:
        column = suite.column(PEER, files, place)
        failed = [test for test, result in _read(place.results_of(RAYLOOM)).items() if result.outcome == "failed"]
        _say(f"{suite.name}: the peer, {len(failed)} tests that fail on our server")
        run_column(column, resume=True, words=words, only=failed)
        if not options.needed:
            _say(f"{suite.name}: the peer, all other tests")
            run_column(column, resume=True, words=words)


def _repeat_owed(suite: Suite, place: Place, options: argparse.Namespace) -> None:
    """Repeats, on our server, the tests that only the peer passes: most of them depend on sampled answers."""
    if RAYLOOM not in options.servers.split(","):
        return
    for _ in range(_REPEATS):
        owed = [each.test for each in _comparisons(suite, place, options.k) if each.is_owed]
        if not owed:
            return
        _say(f"{suite.name}: our server again, {len(owed)} tests that only the peer passes: {', '.join(owed)}")
        run_column(suite.column(RAYLOOM, options.files or suite.files, place), resume=False, only=owed)


def _comparisons(suite: Suite, place: Place, chosen: str) -> list[Comparison]:
    ours = _read(place.results_of(RAYLOOM))
    theirs = _read(place.results_of(PEER)) if suite.has_peer else _expected(suite)
    if chosen:
        theirs = {test: result for test, result in theirs.items() if test in ours}
    return compare(ours, theirs, not_applicable=suite.not_applicable, exceptions=suite.exceptions)


def _expected(suite: Suite) -> dict[str, Result]:
    return {test: Result(outcome) for test, outcome in suite.expected.items()}


def _page(suite: Suite, comparisons: Sequence[Comparison]) -> str:
    peer = suite.name if suite.has_peer else f"{suite.name} (expected)"
    source = f"\n\nExpected outcomes: {suite.expected_source}." if suite.expected_source else ""
    title = f"## Tests of {suite.name} {suite.version}{source}"
    return f"{title}\n\n{table(comparisons, peer)}\n\n{listed(comparisons)}".rstrip()


def _read(path: Path) -> dict[str, Result]:
    return read_results(path.read_text(encoding="utf-8").splitlines()) if path.exists() else {}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
