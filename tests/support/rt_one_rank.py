"""One rank of a model in this process, loaded once, and engines on this rank with different pool sizes and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rayloom_engine.build import EngineSizes, engine_on
from rayloom_engine.config import EngineConfig
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.sequence import Sequence as EngineSequence
from rayloom_engine.kv.host_file import HostFile
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.parallel.model_part import whole_part
from rayloom_engine.worker.host_memory import HostMemoryPlace
from rayloom_engine.worker.start import find_model, load_rank


class OneRank:
    """A loaded model. Engines on this rank are used one after the other."""

    def __init__(self, folder: Path, host: HostMemoryPlace | None = None, **settings: object) -> None:
        self.config = EngineConfig(
            model=str(folder), dtype="float32", device="cpu", threads=1, num_kv_blocks=64, **settings
        )
        resolved, self.shape = find_model(self.config, no_progress)
        part = whole_part(self.shape.num_layers)
        self._rank = load_rank(self.config, resolved, self.shape, no_progress, part=part, host=host)
        self._epoch = 0
        self.loaded = self._rank.loaded
        self.backend = "transformers" if isinstance(self.shape, MeasuredShape) else "native"

    @property
    def host_file(self) -> HostFile:
        assert self._rank.host is not None
        return self._rank.host.file

    def engine(self, *, num_blocks: int = 64, num_step_tokens: int = 512, num_host_slots: int = 0) -> Engine:
        """A new engine on the loaded weights. Its slots and its prefix cache are empty."""
        self._epoch += 1
        runner = self._rank.runner(num_blocks, self._epoch, None)
        sizes = EngineSizes(
            num_blocks=num_blocks, max_model_len=96, num_step_tokens=num_step_tokens, num_host_slots=num_host_slots
        )
        return engine_on(self.config, LocalExecutor(runner), self.shape, sizes, self._epoch)


def greedy(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, resumed: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """The greedy tokens of all prompts, computed in one batch.

    `resumed`: the tokens that another engine generated for each prompt before it died. The sequences are submitted with
    these tokens, as after a real crash.
    """
    ids: dict[str, list[int]] = {}
    params = DecodingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        generated = list(resumed[index]) if resumed else []
        ids[str(index)] = generated
        sequence = EngineSequence(
            request_id=str(index), prompt_ids=prompt, params=params, eos_token_ids=(), generated_ids=generated
        )
        engine.add(sequence, is_resume=bool(resumed))
    while engine.has_unfinished:
        for output in engine.step():
            ids[output.sequence_id] += output.token_ids
    return list(ids.values())
