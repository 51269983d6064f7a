"""Two ranks in processes of their own.

They load one tiny model after the other, and divide the layers of each model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rayloom_engine.core.step import StepPlan
from rayloom_engine.errors import ConfigError
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.worker.start import find_model
from rt_forks import WarmForks
from rt_one_rank import greedy
from rt_stages import RankProcesses, make_engine, stage_config

_JOIN_SECONDS = 100.0  # a join takes this long only if it fails
_epochs = itertools.count(1)


class TwoRanks:
    """The processes are started for the first model, and restarted if one of them has failed."""

    def __init__(
        self, preload: str = "rayloom_engine.models.on_transformers.model", *, exchanges_on_host: bool = False
    ) -> None:
        """`preload`: a module that the ranks need. `exchanges_on_host`: as for RankProcesses."""
        self._forks = WarmForks(preload)
        self._exchanges_on_host = exchanges_on_host
        self._ranks: RankProcesses | None = None
        self.num_losses = 0

    def greedy(
        self,
        folder: Path,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        killed: int | None = None,
    ) -> list[list[int]]:
        """The greedy tokens after each prompt, with a small pool and budget. Empty if the engine refuses the layout.

        `killed`: the rank whose process is killed before the seventh step. Its replacement joins the other rank. Raises
        RuntimeError if a rank fails.
        """
        config = stage_config(folder, pipeline, tensor_parallel_size=tensor)
        try:
            find_model(config, no_progress)
        except ConfigError:
            return []
        try:
            if self._ranks is None:
                self._ranks = RankProcesses(config, self._forks, exchanges_on_host=self._exchanges_on_host)
            else:
                self._ranks.load(config)
            epoch = next(_epochs)
            self._ranks.join(epoch, _JOIN_SECONDS)
            engine = make_engine(_Struck(self._ranks, killed), epoch, depth=pipeline)
            step = engine.step

            def step_or_rebuild() -> list[object]:
                assert self._ranks is not None
                try:
                    return step()
                except RuntimeError:
                    if killed is None:
                        raise
                    self.num_losses += 1
                    self._ranks.start(killed)
                    engine.scheduler.epoch = next(_epochs)
                    self._ranks.join(engine.scheduler.epoch, _JOIN_SECONDS)
                    return []

            engine.step = step_or_rebuild  # type: ignore[method-assign,assignment]
            return greedy(engine, prompts, num_tokens)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        self._end()
        self._forks.close()

    def _end(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


class _Struck:
    """The executor of RankProcesses, which kills a rank's process once."""

    def __init__(self, ranks: RankProcesses, victim: int | None) -> None:
        self._ranks = ranks
        self._victim = victim
        self._num_steps = 0
        self.collect = ranks.collect
        self.forget_all = ranks.forget_all

    def submit(self, plan: StepPlan) -> None:
        self._num_steps += 1
        if self._num_steps == 7 and self._victim is not None:
            process = self._ranks.processes[self._victim]
            process.kill()
            process.join(10.0)
        self._ranks.submit(plan)
