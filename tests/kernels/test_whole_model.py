"""A whole engine on the Triton kernels: chunked prompts, shared prefixes, forks, preemption and a replay.

The engine's tokens equal those of the plain kernels. The rank chooses its attention as usual.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.target import Backend
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.shape import read_shape
from rayloom_engine.worker.gpu_sampler import GpuSampler
from rayloom_engine.worker.runner import Runner
from rayloom_engine.worker.torch_computation import DecodeLimits, TorchComputation
from rt_tiny import tiny_variant
from rt_triton import DEVICE, target

EPOCH = 1
NUM_BLOCKS = 6  # blocks of 16 tokens, too few for all requests at the same time
MAX_TOKENS = 8


class Rank:
    """A rank that can lose a step.

    Then its runner raises, and a new runner with an empty cache replaces the old runner.
    """

    def __init__(
        self, folder: Path, backend: Backend, fails_at: int | None = None, limits: DecodeLimits | None = None
    ) -> None:
        shape = read_shape(folder)
        kernels = choose_kernels(target(backend))
        self._model = load_model(folder, shape, kernels, dtype=kernels.target.compute_dtype).model
        self._fails_at = fails_at
        self._limits = limits
        self.num_steps = 0
        self.forget_all()

    def forget_all(self) -> None:
        cache = KvPages.allocate(
            self._model.kv_layout,
            num_blocks=NUM_BLOCKS,
            block_size=16,
            dtype=self._model.kernels.target.compute_dtype,
            device=DEVICE,
        )
        self.computation = TorchComputation(self._model, cache, self._limits)
        self.runner = Runner(self.computation, self._model.shape, self._model.part, EPOCH)

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        result = self.runner.run(plan)
        if self.num_steps == self._fails_at:
            raise KeyboardInterrupt
        return result


def engine_on(rank: Rank) -> Engine:
    config = SchedulerConfig(
        num_blocks=NUM_BLOCKS,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=64,
        max_queued=100,
        depth=1,
    )
    return Engine(Scheduler(config, EPOCH), LocalExecutor(rank), clock=lambda: 0.0)


def answers(rank: Rank) -> tuple[dict[str, list[SequenceOutput]], Engine]:
    """The outputs of requests that are greedy, seeded, forked, filtered, with penalties and logprobs."""
    greedy = DecodingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    long_prompt = [index * 7 % 256 for index in range(3, 43)]
    short_prompt = [index * 5 % 256 for index in range(1, 16)]
    requests: dict[str, tuple[list[int], DecodingParams, str | None]] = {
        # The first three sequences soon need a second block each, while the long prompt needs three blocks.
        "short": (short_prompt, msgspec.structs.replace(greedy, frequency_penalty=0.5, repetition_penalty=1.2), None),
        "seeded": (short_prompt[1:], msgspec.structs.replace(greedy, temperature=1.0, seed=5, top_k=20), None),
        "fork": (short_prompt[1:], msgspec.structs.replace(greedy, temperature=1.0, seed=6, min_p=0.02), "seeded"),
        "greedy": (long_prompt, greedy, None),
        "prefix": (long_prompt[:35], msgspec.structs.replace(greedy, temperature=0.9, top_p=0.9, seed=3), None),
        "logprobs": (long_prompt[5:35], msgspec.structs.replace(greedy, logprobs=2, prompt_logprobs=1), None),
    }
    engine = engine_on(rank)
    outputs: dict[str, list[SequenceOutput]] = {name: [] for name in requests}
    for name, (prompt, params, fork_of) in requests.items():
        engine.add(Sequence(request_id=name, prompt_ids=prompt, params=params, fork_of=fork_of))
    while engine.has_unfinished:
        with contextlib.suppress(KeyboardInterrupt):  # the step that is lost
            for output in engine.step():
                outputs[output.sequence_id].append(output)
        engine.scheduler.check_integrity()
    return outputs, engine


def ids_of(outputs: dict[str, list[SequenceOutput]]) -> dict[str, list[int]]:
    return {name: [token for part in parts for token in part.token_ids] for name, parts in outputs.items()}


@pytest.mark.parametrize("limits", [None, DecodeLimits(max_num_seqs=3, max_context_len=64)])
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_an_engine_on_triton_kernels_answers_as_on_plain_ones(
    variant: str, limits: DecodeLimits | None, tmp_path: Path
) -> None:
    folder = tiny_variant(tmp_path, variant)
    expected, _ = answers(Rank(folder, "plain"))
    rank = Rank(folder, "triton", limits=limits)
    found, engine = answers(rank)
    assert isinstance(rank.computation.sample, GpuSampler)
    assert ids_of(found) == ids_of(expected)
    assert {len(ids) for ids in ids_of(found).values()} == {MAX_TOKENS}
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0, stats
    entries = [entry for part in found["logprobs"] for entry in part.logprobs]
    wanted = [entry for part in expected["logprobs"] for entry in part.logprobs]
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in wanted], abs=1e-4)


def test_an_engine_on_triton_kernels_replays_a_lost_step(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "qwen3")
    expected, _ = answers(Rank(folder, "plain"))
    rank = Rank(folder, "triton", fails_at=5)
    found, _ = answers(rank)
    assert rank.num_steps > 5
    assert ids_of(found) == ids_of(expected)
