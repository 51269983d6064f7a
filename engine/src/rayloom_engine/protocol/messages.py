"""Messages between API server processes ("fronts") and the EngineCore ("core"). Version 2.

Each is msgpack with a 4-byte big-endian length before it. A front sends Hello (with the token) and gets Welcome, or the
connection is closed. One Submit is one sequence; a request with n > 1 is n sequences, whose Submits cross in one
SubmitChoices because they have the same prompt. When the connection ends because the core died, the front connects
again and submits every unfinished sequence with the ids that it has received: a resume, in the same message. Sequence
ids are random, so no two sequences of a server share one; a sequence keeps its id when it is submitted again.
"""

from __future__ import annotations

import msgspec

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.output import SequenceOutput as SequenceOutput
from rayloom_engine.core.stats import SchedulerStats

PROTOCOL_VERSION = 2


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    token: str
    front_id: str
    version: int = PROTOCOL_VERSION


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    sequence_id: str
    prompt_ids: tuple[int, ...]
    params: DecodingParams
    generated_ids: tuple[int, ...] = ()  # received by the front; they stay as they are and count in max_tokens
    priority: int = 0  # lower runs first, as in vLLM
    arrival: float = 0.0  # seconds since the Unix epoch at acceptance; order within a priority, also after a resume
    fork_of: str | None = None  # sequence id with the same prompt whose KV blocks may be shared (n > 1)
    is_resume: bool = False  # accepted before: never refused for a full queue
    tenant: str = ""  # its share of slots and queue is used; empty unless the server has several API keys
    cache_key: bytes = b""  # only sequences with equal keys share cached prefixes; at most 64 bytes


class SubmitChoices(msgspec.Struct, frozen=True, tag="submit_choices"):
    """Several Submits with one prompt, which is sent once."""

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


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    outputs: tuple[SequenceOutput, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """A sequence that was not accepted; or an accepted one that cannot continue: `poison` or `corrupt`."""

    sequence_id: str
    reason: str  # "queue_full" | "too_long" | "invalid" | "poison" (the engine dies of it) | "corrupt" (NaN logits)
    message: str
    retry_after_s: int = 1


class PhaseProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one named phase of a start or a rebuild. `total` 0 = not countable."""

    name: str  # "resolve" | "convert" | "discover" | "reserve" | "start_ranks" | "import" | "load" | "warm_up" | ...
    seconds: float
    done: int = 0
    total: int = 0
    unit: str = ""
    is_finished: bool = False


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the model that a front needs to accept requests; known once the engine is built."""

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


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of one rank, by its newest heartbeat."""

    rank: int
    node: str  # the Kubernetes node, or the host's name
    host: str  # the host's name; in Kubernetes the pod's
    pid: int
    phase: str  # a start-up phase, then "idle" | "step"
    heartbeat_age_s: float
    step: int
    memory_bytes: int  # resident
    advance: int = 0  # rises with every part of a layer since the epoch began
    communication_s: float = 0.0  # time of waiting for other ranks since the process started
    weight_bytes_read: int = 0  # from files, since the process started


class CoreStatus(msgspec.Struct, frozen=True, tag="status", kw_only=True):
    """Sent to every front once a second, and more often during a start."""

    state: str  # "starting" | "serving" | "recovering" | "failed"
    epoch: int
    executor: str  # "uni" | "mp" | "ray"
    step: int
    last_token_age_s: float | None  # since a token last went through all ranks; None before the first
    phases: tuple[PhaseProgress, ...]
    stats: SchedulerStats
    ranks: tuple[RankReport, ...]
    model: ServedModel | None = None
    message: str = ""  # cause of the failure or recovery, or the KV sizing line
    lost: str = ""  # while recovering: the lost rank, as "rank N"
    lost_node: str = ""  # and its node
    heartbeat_age_s: float = 0.0  # since the core's main thread last ended a step or checked its inbox
    last_work_age_s: float | None = None  # since the computing rank showed work; None while no step is computed


FrontMessage = Hello | Submit | SubmitChoices | Abort
CoreMessage = Welcome | Outputs | Refused | CoreStatus
