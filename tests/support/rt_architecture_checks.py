"""Compares the greedy tokens of a tiny model with those of transformers, for different schedules of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayloom_engine.errors import ConfigError
from rt_architectures import NUM_TOKENS, VOCAB_SIZE, TinyArchitecture, architecture_checkpoint, greedy_tokens
from rt_one_rank import OneRank, greedy
from rt_stages import StagesInARow, load_stages, make_engine, stage_config

# Each of the first three prompts needs one block of 16 tokens. With their answers, these prompts need eight blocks.
PROMPTS = [
    [3 + (7 * index + 5 * position) % (VOCAB_SIZE - 3) for position in range(length)]
    for index, length in enumerate((5, 15, 14, 43))
]
_NUM_BLOCKS = 6
_NUM_BEFORE_DEATH = 5  # tokens that an engine has generated when it dies

CHECKS = ("at once", "chunked", "batched", "preempted", "replayed", "two stages")
_ALONE = ("at once", "chunked")


@dataclass(frozen=True, slots=True)
class Compared:
    """The tokens of transformers, and those of the engine for each of CHECKS.

    `num_alone`: the number of tokens of each answer in the checks that compute one prompt after the other (_ALONE).
    """

    backend: str
    expected: list[list[int]]
    found: dict[str, list[list[int]]]
    num_preemptions: int
    num_alone: int

    @property
    def passed(self) -> dict[str, bool | None]:
        """Check -> True if the tokens are equal. None: the engine refuses to compute the model in this way."""
        first = [tokens[: self.num_alone] for tokens in self.expected]
        equal = {
            check: self.found[check] == (first if check in _ALONE else self.expected) if self.found[check] else None
            for check in CHECKS
        }
        return {**equal, "preempted": equal["preempted"] and self.num_preemptions > 0}


def compare(
    folder: Path, architecture: TinyArchitecture, num_alone: int = NUM_TOKENS, model_backend: str = "auto"
) -> Compared:
    """Writes a checkpoint into `folder`, and computes the prompts by each of CHECKS, with ranks in this process.

    `num_alone`: as in Compared. These two checks take half of all steps.
    """
    architecture_checkpoint(folder, architecture)
    expected = greedy_tokens(folder, PROMPTS)
    rank = OneRank(folder, model_backend=model_backend)
    small = rank.engine(num_blocks=_NUM_BLOCKS)
    found = {
        "at once": [greedy(rank.engine(), [prompt], num_alone)[0] for prompt in PROMPTS],
        "chunked": [greedy(rank.engine(num_step_tokens=7), [prompt], num_alone)[0] for prompt in PROMPTS],
        "batched": greedy(rank.engine(num_step_tokens=11), PROMPTS, NUM_TOKENS),
        "preempted": greedy(small, PROMPTS, NUM_TOKENS),
        "two stages": _of_two_stages(folder, model_backend),
        "replayed": greedy(rank.engine(), PROMPTS, NUM_TOKENS, resumed=_before_death(rank)),
    }
    return Compared(rank.backend, expected, found, small.stats().num_preemptions, num_alone)


def _of_two_stages(folder: Path, model_backend: str) -> list[list[int]]:
    """The tokens of two pipeline stages. The small block pool and token budget also cause chunks and preemptions."""
    try:
        ranks = load_stages(stage_config(folder, 2, model_backend=model_backend))
    except ConfigError:
        return []  # this backend cannot divide the model's layers into stages
    return greedy(make_engine(StagesInARow(ranks)), PROMPTS, NUM_TOKENS)


def _before_death(rank: OneRank) -> Sequence[Sequence[int]]:
    """The first tokens of each answer. The KV cache of the engine that generates them is not used afterwards."""
    return greedy(rank.engine(), PROMPTS, _NUM_BEFORE_DEATH)
