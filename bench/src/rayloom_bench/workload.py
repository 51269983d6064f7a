"""The workloads and their prompts. Pure: the same seed gives the same prompts on every machine."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rayloom_engine.errors import ConfigError

# A JSON schema whose shortest instance is longer than any output of the workloads, so that no answer ends early.
LONG_ARRAY: Mapping[str, object] = {"type": "array", "items": {"type": "integer"}, "minItems": 100}

# Output tokens of each warm-up request: enough for steps of every batch size. All warm-up requests together have few
# output tokens compared with the measured requests.
WARM_UP_OUTPUT = 16

Purpose = Literal["measured", "warm-up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of equal lengths. Lengths are in tokens. `concurrency` requests run at a time."""

    name: str
    num_requests: int
    concurrency: int  # number of requests at a time: when a request finishes, the next request is sent at once
    num_shared: int = 0  # length of the prefix that all prompts share
    num_own: int
    num_output: int
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # 1: every token may be drawn
    is_json: bool = False  # True: every answer is forced to be the beginning of an instance of LONG_ARRAY

    @property
    def num_prompt(self) -> int:
        return self.num_shared + self.num_own

    @property
    def description(self) -> str:
        prompt = f"{self.num_shared} shared + {self.num_own} own" if self.num_shared else str(self.num_own)
        pace = "one at a time" if self.concurrency == 1 else f"{self.concurrency} at a time"
        noun = "request" if self.num_requests == 1 else "requests"
        sampling = f", temperature {self.temperature:g}, top_p {self.top_p:g}" if self.temperature else ""
        form = ", forced to be JSON" if self.is_json else ""
        return f"{self.num_requests} {noun}, {pace}, {prompt} in / {self.num_output} out{sampling}{form}"

    def scaled(self, scale: float) -> Workload:
        """The workload with fewer requests, rounded up to whole batches. Concurrency and lengths stay the same."""
        num_batches = max(1, math.ceil(self.num_requests * scale / self.concurrency))
        return dataclasses.replace(self, num_requests=min(self.num_requests, num_batches * self.concurrency))

    def warm_up(self) -> Workload:
        """A workload of one batch with the same prompt lengths and short outputs."""
        return dataclasses.replace(self, num_requests=self.concurrency, num_output=min(self.num_output, WARM_UP_OUTPUT))


WORKLOADS = (
    Workload(name="W1", num_requests=32, concurrency=16, num_own=128, num_output=64),
    Workload(name="W2", num_requests=32, concurrency=16, num_shared=512, num_own=32, num_output=32),
    Workload(name="W3", num_requests=8, concurrency=1, num_own=128, num_output=128),
    Workload(name="W4", num_requests=8, concurrency=4, num_own=2048, num_output=32),
)


def parse_workloads(names: str, scale: float, known: tuple[Workload, ...] = WORKLOADS) -> tuple[Workload, ...]:
    """The workloads of a list such as `W1,W3`, in the order given. Raises ConfigError for an unknown name or scale."""
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale: {scale:g} given, it must be more than 0 and at most 1")
    by_name = {workload.name.upper(): workload for workload in known}
    chosen = [name.strip().upper() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in by_name]
    if unknown or not chosen or len(set(chosen)) < len(chosen):
        allowed = ", ".join(workload.name for workload in known)
        raise ConfigError(
            f"--workloads: {names!r} given; name one or more of {allowed}, each once, with commas between"
        )
    return tuple(by_name[name].scaled(scale) for name in chosen)


def prompt_rng(workload: Workload, *, seed: int, purpose: Purpose) -> random.Random:
    """The generator of one set of prompts. Sets differ, so that no set finds a prefix of another set in the cache."""
    return random.Random(f"{seed}/{workload.name}/{purpose}")  # nosec: not for secrets; a string seed is portable


def token_prompts(
    workload: Workload, *, seed: int, vocab_size: int, purpose: Purpose = "measured"
) -> tuple[tuple[int, ...], ...]:
    """Random token ids, one tuple for each request.

    Ids are from the middle half of the vocabulary, because special tokens are at its two ends.
    """
    rng = prompt_rng(workload, seed=seed, purpose=purpose)
    ids = range(vocab_size // 4, max(vocab_size // 4 + 1, 3 * vocab_size // 4))
    shared = rng.choices(ids, k=workload.num_shared)
    return tuple((*shared, *rng.choices(ids, k=workload.num_own)) for _ in range(workload.num_requests))
