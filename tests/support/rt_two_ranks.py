"""Two ranks in processes of their own, which load one tiny model after the other and share its layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rayloom_engine.errors import ConfigError
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.worker.start import find_model
from rt_one_rank import greedy
from rt_stages import RankProcesses, make_engine, stage_config

_epochs = itertools.count(1)


class TwoRanks:
    """Processes are started for the first model, and again after one of them died."""

    def __init__(self) -> None:
        self._ranks: RankProcesses | None = None

    def greedy(self, folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """The greedy tokens after each prompt, of a small pool and budget; none if the engine refuses two ranks.

        Raises RuntimeError if a rank fails.
        """
        config = stage_config(folder, tensor_parallel_size=2)
        try:
            find_model(config, no_progress)
        except ConfigError:
            return []
        try:
            if self._ranks is None:
                self._ranks = RankProcesses(config)
            else:
                self._ranks.load(config)
            epoch = next(_epochs)
            self._ranks.join(epoch)
            return greedy(make_engine(self._ranks, epoch), prompts, num_tokens)
        except (AssertionError, RuntimeError):
            self.close()
            raise

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None
