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
    """Where a suite finds and puts its files."""

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
    # returns the column of a server, for these files and this place; installs what the tests need
    column: Callable[[str, Sequence[str], Place], Column]
    has_peer: bool = True  # False: the peer itself cannot run here, and `expected` stands for it
    # A part of a test's id -> the reason why the test's result shows nothing about a server.
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    # A part of a test's id -> the cause of a failure that only our server has, and that will not be mended.
    exceptions: Mapping[str, str] = field(default_factory=dict)
    # A test's id -> its outcome on the peer, for peers that cannot run here, and where the outcome was read.
    expected: Mapping[str, str] = field(default_factory=dict)
    expected_source: str = ""
