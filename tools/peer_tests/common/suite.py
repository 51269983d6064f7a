"""Suite: the tests of one peer, how they run on a server, and the failures that do not count against ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peer_tests.common.column import Column
from rayloom_bench.peers.engines.installation import Log

RAYLOOM = "rayloom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The folders from which a suite reads and to which it writes files."""

    cache: Path  # the folder of all peers
    results: Path
    log: Log

    def results_of(self, server: str) -> Path:
        return self.results / f"{server}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The tests of one peer."""

    name: str
    version: str  # versions of the tests and of the peer; results of other versions are not reused
    files: Sequence[str]
    # (server, files, place) -> column; installs the packages that the tests need
    column: Callable[[str, Sequence[str], Place], Column]
    has_peer: bool = True  # False: the peer itself cannot run here; its outcomes are read from `expected`
    # A part of a test's id -> the reason why the test's result shows nothing about a server.
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    # A part of a test's id -> the cause of a failure that only our server has, and that will not be fixed.
    exceptions: Mapping[str, str] = field(default_factory=dict)
    # For peers that cannot run here: a test's id -> its outcome on the peer; and the source of these outcomes.
    expected: Mapping[str, str] = field(default_factory=dict)
    expected_source: str = ""
