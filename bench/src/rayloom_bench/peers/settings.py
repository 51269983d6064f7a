"""The settings of `bench peers`, checked before anything is installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rayloom_bench.workload import Workload
from rayloom_engine.errors import ConfigError

MOST_NEIGHBOUR_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSettings:
    """The checked command line of `rayloom-engine bench peers`."""

    engines: tuple[str, ...]  # names in names.ALL
    workloads: tuple[Workload, ...]  # measured in every round
    sweeps: tuple[Workload, ...]  # measured once, after the rounds; empty with --no-sweep
    num_rounds: int
    scale: float
    seed: int
    cores: tuple[int, ...]  # cores that this process may use; every engine gets all of them
    compares_answers: bool
    neighbour_s: float  # seconds of one stream beside a busy process, and again of one stream alone; 0: not measured
    is_install_only: bool
    page_folder: Path | None  # None: the page goes to the terminal only
    has_plots: bool
    json_file: Path | None
    command: str  # the command line as it was typed, for the page

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that cannot work."""
        if self.num_rounds < 1:
            raise ConfigError(f"--rounds: {self.num_rounds} given; use 1 or more")
        if not 0 <= self.neighbour_s <= MOST_NEIGHBOUR_S:
            raise ConfigError(f"--neighbour-seconds: {self.neighbour_s:g} given; use 0 to {MOST_NEIGHBOUR_S}")
        for flag, path in (("--page", self.page_folder), ("--json", self.json_file)):
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(f"{flag}: the folder {path.absolute().parent} does not exist; make it first")
