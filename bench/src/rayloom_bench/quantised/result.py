"""The results of `bench quantised`, which are added while it runs, and the ratios of a file. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayloom_bench.client import Failure
from rayloom_bench.peers.answers.agreement import Agreement
from rayloom_bench.quantised.files import QuantisedFile
from rayloom_bench.spread import Spread, quotients, spread
from rayloom_bench.workload import Workload

OURS = "rayloom"
OURS_INT8 = "rayloom int8"
LLAMA = "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSample:
    """One server and workload in one round."""

    output_tok_s: float
    cpu_ms_per_token: float  # CPU time of all processes of the server for each output token, prompts included


@dataclass(slots=True, kw_only=True)
class FileResult:
    """The measurements with one file. `samples`: server -> workload -> round -> sample."""

    file: QuantisedFile
    samples: dict[str, dict[str, dict[int, ServerSample]]] = field(default_factory=dict)
    agreement: Agreement | None = None  # agreement of our greedy answers with llama.cpp's

    def add(self, server: str, workload: str, round_number: int, sample: ServerSample) -> None:
        self.samples.setdefault(server, {}).setdefault(workload, {})[round_number] = sample

    def tok_s(self, server: str, workload: str) -> dict[int, float]:
        """Round -> output tokens per second."""
        return {number: sample.output_tok_s for number, sample in self._of(server, workload).items()}

    def cpu_ms(self, server: str, workload: str) -> dict[int, float]:
        """Round -> milliseconds of CPU time for an output token."""
        return {number: sample.cpu_ms_per_token for number, sample in self._of(server, workload).items()}

    def speed_ratio(self, server: str, workload: str) -> Spread | None:
        """By round: the server's tokens per second divided by llama.cpp's."""
        return spread(quotients(self.tok_s(server, workload), self.tok_s(LLAMA, workload)))

    def cpu_ratio(self, server: str, workload: str) -> Spread | None:
        """By round: llama.cpp's CPU time for a token divided by the server's."""
        return spread(quotients(self.cpu_ms(LLAMA, workload), self.cpu_ms(server, workload)))

    def _of(self, server: str, workload: str) -> Mapping[int, ServerSample]:
        return self.samples.get(server, {}).get(workload, {})


@dataclass(slots=True, kw_only=True)
class QuantisedResult:
    """The results of a run."""

    conditions: str  # processor, threads, date, versions and settings, as sentences
    workloads: tuple[Workload, ...]
    files: list[FileResult] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)  # server -> its command line without ports and folders
    read_bytes_s: float | None = None  # memory bandwidth, measured in this run
    failures: list[Failure] = field(default_factory=list)
    most_disturbed_percent: float = 0.0  # largest share of CPU time that other processes used during a measurement
