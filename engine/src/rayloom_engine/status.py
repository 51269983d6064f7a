"""The admin port's `/status` document, version 1. Its JSON schema is `schemas/status.v1.json`.

The operator acts on `state`:
  starting    the model is not loaded yet; nothing is accepted
  serving     requests are accepted and tokens flow
  recovering  the core (or a rank) is lost and being rebuilt; accepted requests wait, new ones queue
  draining    running requests finish, new ones get 503
  failed      for good; `reason` holds the first cause

A request with `Prefer: return=minimal` gets only the fields that the operator reads: without `recoveries` and
`speculation`, and with only `node` of each rank. The operator recognises such an answer by the header
`Preference-Applied: return=minimal`, and accepts at most 64 KiB of the answer. The whole document of an engine with 128
ranks is larger. Engines of an earlier version do not send this header. Without the header, the operator accepts 256
KiB.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

State = Literal["starting", "serving", "recovering", "draining", "failed"]


class _StatusPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Phase(_StatusPart):
    name: str
    seconds: float
    done: int = Field(description="Units done, of `total`.")
    total: int = Field(description="0 = not countable.")
    unit: str
    finished: bool


class Model(_StatusPart):
    name: str = Field(description="Name in the API.")
    source: str
    commit: str | None
    architecture: str
    num_parameters: int
    dtype: str = Field(description="Type of the weights; if they are quantised, the type from which they were.")
    compute_dtype: str = Field(description="Type of the arithmetic on this device.")
    quantization: str = Field(
        description="Form of the weights in memory: none, which is their type, int8, or the checkpoint's scheme, such "
        "as awq-int4-g128."
    )
    weight_bytes: int
    max_model_len: int


class Rank(_StatusPart):
    rank: int
    node: str = Field(description="The Kubernetes node, or the host's name.")
    host: str = Field(description="The host's name; in Kubernetes the pod's.")
    pid: int
    phase: str = Field(description="A start-up phase, then idle or step.")
    heartbeat_age_seconds: float
    step: int
    memory_bytes: int = Field(description="Resident memory of the rank's process.")
    advance: int = Field(description="Parts of layers computed in this epoch; stands still when the rank does.")
    communication_seconds: float = Field(description="Time of waiting for other ranks since the process started.")
    weight_bytes_read: int = Field(
        description="Bytes read from files since the process started; a rank that survives a loss reads no "
        "weights again."
    )


class Requests(_StatusPart):
    in_flight: int = Field(description="Accepted HTTP requests not yet answered in full.")
    running: int = Field(description="Sequences in the running batch.")
    waiting: int = Field(description="Sequences in the core's queue; of a gateway, those that wait for an engine.")
    finished: int = Field(
        description="Requests that ended, with or without an error, since the front started, with those of gateways; "
        "without refused requests and those whose client disconnected."
    )
    failed: int = Field(
        description="Requests of `finished` that ended in an error of the engine's, as HTTP 5xx or as an error event "
        "in the stream; without those that a drain or a full queue refuses. An engine does not count errors of its "
        "gateways."
    )
    first_token_seconds: dict[str, int] = Field(
        description="Seconds, +Inf for all -> requests since the front started whose first token took no longer; of "
        "requests of gateways, from their arrival at the engine."
    )


class KvCache(_StatusPart):
    num_blocks: int
    num_free_blocks: int
    block_size: int
    usage: float = Field(ge=0, le=1)


class Load(_StatusPart):
    """The work that the engine has, and the rates that it has measured of itself. An autoscaler compares both."""

    queued_tokens: int = Field(
        0,
        description="Tokens of prompts that are still to be computed, of waiting and of running sequences; of a "
        "gateway, the tokens of sequences that wait for an engine.",
    )
    running_tokens: int = Field(0, description="Tokens in the KV cache that running sequences hold.")
    max_running_tokens: int = Field(
        0,
        description="Tokens that running sequences could hold at their present mean length, before the slots "
        "(`max_num_seqs`) or the KV cache are full.",
    )
    mean_output_tokens: float = Field(0.0, description="Mean length of the last 32 outputs; 0 before the first.")
    prefill_tokens_per_second: float | None = Field(
        None,
        description="Rate of a prompt that fills a step (`max_num_batched_tokens`), measured in earlier steps; null "
        "before.",
    )
    decode_tokens_per_second: float | None = Field(
        None, description="Rate of all sequences together with every slot in use, from measured steps; null before."
    )


class Speculation(_StatusPart):
    """Draft tokens (`speculation`) since the core started."""

    draft_tokens: int = Field(0, description="Draft tokens that were verified.")
    accepted_tokens: int = Field(0, description="Draft tokens that equal the sampled ones.")


class ReportedAdapter(_StatusPart):
    """A LoRA adapter that PUT /adapters or the setting `adapters` asks for."""

    name: str = Field(description="Name in the API.")
    path: str = Field(description="Folder or place on the hub, as it was given.")
    state: Literal["loading", "loaded", "failed"] = Field(
        description="loaded: requests can name it. failed: it cannot be used; the engine tries again every 30 s."
    )
    message: str = Field("", description="Why it failed; else empty.")
    commit: str = Field("", description="Commit of the files of an adapter of the hub, once it is loaded; else empty.")


class RecoveryPhase(_StatusPart):
    name: str = Field(
        description="suspect (the search for the failed process), then the phases of a start, then replay (the first "
        "step)."
    )
    seconds: float


class Recovery(_StatusPart):
    cause: str
    process: str = Field(description="core, front or rank N.")
    node: str = Field(description="Place of the loss: the Kubernetes node, or the host's name.")
    at: float = Field(description="Unix time at which the loss was noticed.")
    seconds: float | None = Field(description="Until tokens could flow again; null while it lasts.")
    replayed_requests: int
    phases: list[RecoveryPhase] = Field(
        description="Phases of the rebuild, in order; empty while it lasts, and for a front."
    )


class EngineStatus(_StatusPart):
    version: Literal["v1"] = "v1"
    engine_version: str
    state: State
    reason: str = Field(description="Reason of the state; empty when serving.")
    executor: str = Field(description="Starter of ranks: uni, mp, ray or external; empty until the core answers.")
    epoch: int = Field(description="Raised by every rebuild.")
    step: int
    last_token_age_seconds: float | None = Field(
        description="Since a token went through every rank; null before the first."
    )
    last_work_age_seconds: float | None = Field(
        default=None, description="Since a rank that computes advanced or burned CPU time; null while none computes."
    )
    uptime_seconds: float
    model: Model | None
    startup: list[Phase]
    ranks: list[Rank]
    requests: Requests
    kv_cache: KvCache
    load: Load = Load()
    speculation: Speculation = Speculation()
    adapters: list[ReportedAdapter] | None = Field(
        None, description="LoRA adapters; null unless the setting `managed_adapters` is on."
    )
    adapters_from_hub: bool = Field(
        True, description="PUT /adapters accepts adapters of the hub. Engines of older versions leave this out."
    )
    recoveries: list[Recovery] = Field(description="The last 100.")
    api_url: str

    def minimal_json(self) -> str:
        """Returns the document with only the fields that the operator reads."""
        others = set(Rank.model_fields) - {"node"}
        return self.model_dump_json(exclude={"recoveries": True, "speculation": True, "ranks": {"__all__": others}})
