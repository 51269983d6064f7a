"""Messages between fronts and the core. Version 2; msgpack, each with a 4-byte big-endian length before it.

A front says Hello (with the token) and gets Welcome, or the connection is closed. One Submit is one sequence; a request
with n > 1 is n sequences, whose Submits cross in one SubmitChoices because they have the same prompt. A front that sees
the connection end (the core died) connects again and submits every unfinished sequence with the ids it has received:
that is `resume`, and it is the same message. Sequence ids are random, so that no two sequences of a server share one; a
sequence keeps its id when it is submitted again.
"""

from __future__ import annotations

import msgspec

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.core.step import TokenLogprobs

PROTOCOL_VERSION = 2


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    token: str
    front_id: str
    version: int = PROTOCOL_VERSION


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    sequence_id: str
    prompt_ids: tuple[int, ...]
    params: DecodingParams
    generated_ids: tuple[int, ...] = ()  # already delivered to the client; never changed, counted in max_tokens
    priority: int = 0  # lower runs first, as in vLLM
    arrival: float = 0.0  # seconds since the Unix epoch at acceptance; order within a priority, also after a resume
    fork_of: str | None = None  # sequence id with the same prompt whose KV blocks may be shared (n > 1)
    is_resume: bool = False  # accepted before: never refused for a full queue
    tenant: str = ""  # whose share of slots and queue it takes; empty where there are no several API keys
    cache_key: bytes = b""  # cached prefixes are shared by sequences with the same one alone; at most 64 bytes


class SubmitChoices(msgspec.Struct, frozen=True, tag="submit_choices"):
    """Several Submits with one prompt, which crosses once."""

    prompt_ids: tuple[int, ...]
    submits: tuple[Submit, ...]  # without prompt_ids

    def with_prompt(self) -> list[Submit]:
        """The Submits, each with the same tuple of prompt ids."""
        return [msgspec.structs.replace(submit, prompt_ids=self.prompt_ids) for submit in self.submits]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    sequence_id: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    epoch: int
    pid: int


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence."""

    sequence_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id when asked for
    # With the first token; the first prompt token has none. Long ones come in parts before it (logprob_parts.py).
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs_start: int = 0  # how many entries the parts before this one have
    finish_reason: str | None = None  # "stop" | "length"; the sequence is gone after it
    stop_token_id: int | None = None  # the id that ended it (EOS or a stop id), which is also the last of token_ids
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; with the first output


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    outputs: tuple[Output, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """A sequence that was not accepted; or, of any age, one that cannot go on: `poison` or `corrupt`."""

    sequence_id: str
    reason: str  # "queue_full" | "too_long" | "invalid" | "poison" (the engine dies of it) | "corrupt" (NaN logits)
    message: str
    retry_after_s: int = 1


class PhaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One named phase of start-up. `total` 0 = not countable."""

    name: str  # "resolve" | "convert" | "discover" | "reserve" | "start_ranks" | "import" | "load" | "warm_up" | ...
    seconds: float
    done: int = 0
    total: int = 0
    unit: str = ""
    is_finished: bool = False


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs of the model before it can accept requests; known once the model is resolved."""

    path: str  # folder with config.json and tokenizer.json
    architecture: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the weights
    compute_dtype: str  # of the arithmetic
    weight_bytes: int
    commit: str | None = None


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    node: str  # the Kubernetes node, or the host's name
    host: str  # the host's name; in Kubernetes the pod's
    pid: int
    phase: str  # a start-up phase, then "idle" | "step"
    heartbeat_age_s: float
    step: int
    memory_bytes: int  # resident
    advance: int = 0  # rises with every part of a layer since the epoch began
    communication_s: float = 0.0  # spent waiting for other ranks since the process started
    weight_bytes_read: int = 0  # from files, since the process started


class CoreStatus(msgspec.Struct, frozen=True, tag="status", kw_only=True):
    """Sent to every front when something changes in start-up, and once a second."""

    state: str  # "starting" | "serving" | "recovering" | "failed"
    epoch: int
    executor: str  # "uni" | "mp" | "ray"
    step: int
    last_token_age_s: float | None  # since a token last passed through all ranks; None before the first
    phases: tuple[PhaseStatus, ...]
    stats: SchedulerStats
    ranks: tuple[RankStatus, ...]
    model: ModelStatus | None = None
    message: str = ""  # why it failed or recovers, or the KV sizing line
    lost: str = ""  # while recovering: which rank
    lost_node: str = ""  # and where it was
    heartbeat_age_s: float = 0.0  # since the core's main thread last ended a step, or looked for work
    last_work_age_s: float | None = None  # since whoever computes a step showed work; None while no step is computed


FrontMessage = Hello | Submit | SubmitChoices | Abort
CoreMessage = Welcome | Outputs | Refused | CoreStatus
