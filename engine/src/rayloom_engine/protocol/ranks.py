"""Messages at the EngineCore's rank port: with ranks (two connections each) and with the launcher (one connection).

Every connection begins with a challenge: the core sends a nonce, and the peer answers with a Greeting that proves that
it has the token.

steps    the rank's main thread. It loads its weights and sends Loaded; then it carries out orders one by one: OpenStore
         (rank 0), Join, Allocate, and then one Run after another. It answers each order, but only the first rank of the
         last stage answers Run. An answer carries the ticket of its order. So the core recognises a late answer to an
         order that it sent before a loss.
control  two more threads of the rank. They run even while the main thread computes or waits for a peer. One of them
         sends a Beat every heartbeat_seconds, the other receives AbortOrders and NeededAdapters. AbortOrders has no
         answer of its own: it makes the orders fail whose waits it ends. Beats contain the answers to NeededAdapters.
launch   the launcher. It reports the phases of placing and starting ranks, and receives Fences.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rayloom_engine.core.adapter import AdapterReport, NeededAdapter
from rayloom_engine.core.step import StepPlan, StepResult

RANK_PROTOCOL_VERSION = 10

Role = Literal["steps", "control", "launch"]


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: str
    version: int = RANK_PROTOCOL_VERSION


class Greeting(msgspec.Struct, frozen=True, tag="greeting", kw_only=True):
    role: Role
    proof: str  # HMAC-SHA256 over nonce, role, rank and incarnation, with the engine's token as key
    rank: int = 0
    incarnation: int = 0  # counts the starts of this rank; raised by the launcher
    pid: int = 0
    node: str = ""  # the Kubernetes node, or the host's name
    host: str = ""  # the host's name; in Kubernetes the pod's
    num_oom_kills: int = 0  # processes that the kernel's OOM killer has ended on this host


class MemoryOffer(msgspec.Struct, frozen=True, tag="memory_offer"):
    """Sent on `steps` to a rank on the core's host, before Welcomed: offers shared memory for all further messages.

    If the rank cannot open the memory, all messages stay on the connection.
    """

    pid: int  # process of the core, to which the descriptors below belong
    name: str  # a random name, by which the rank verifies that it opens the right memory
    memory_fd: int
    to_core_fd: int  # a pipe
    to_rank_fd: int  # a pipe


class MemoryOpened(msgspec.Struct, frozen=True, tag="memory_opened"):
    """A rank's answer to MemoryOffer. If it could not open the memory, all messages stay on the connection."""

    is_open: bool


class Welcomed(msgspec.Struct, frozen=True, tag="welcomed"):
    """Accepts a connection.

    Has the sizes of the first assembly. Ranks that join later use the same sizes, however much memory they have free.
    """

    num_kv_blocks: int | None = None
    max_model_len: int | None = None
    commit: str | None = None  # of the hub model to load; None: not known yet, or the model is not from the hub
    adapters: tuple[NeededAdapter, ...] = ()  # as in NeededAdapters; given on `control`


# --- to a rank, on `steps` ---


class OpenStore(msgspec.Struct, frozen=True, tag="open_store"):
    """Order for rank 0: open a rendezvous store on a free port of the address by which the rank reaches the core."""

    ticket: int


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Order: leave the old process group, and join the group whose members meet at this store."""

    ticket: int
    host: str
    port: int


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """Order: forget all slots, allocate `num_blocks` KV blocks, and warm up together with the other ranks."""

    ticket: int
    epoch: int
    num_blocks: int


class Run(msgspec.Struct, frozen=True, tag="run"):
    ticket: int
    plan: StepPlan


# --- to a rank, on `control` ---


class AbortOrders(msgspec.Struct, frozen=True, tag="abort_orders"):
    """Order: end all waits for other ranks in the orders up to this ticket.

    Sent to every rank when a rank was lost, because the process group cannot be used any more. If a later order has
    already made a rank join a newer group, the rank ignores AbortOrders. If a rank does not wait for a peer, it finds
    the group closed in its next step, or leaves the group at the next Join.
    """

    ticket: int


class NeededAdapters(msgspec.Struct, frozen=True, tag="needed_adapters"):
    """Order: bring the files of these adapters to the rank's machine. Replaces the list of the message before."""

    adapters: tuple[NeededAdapter, ...]


# --- from a rank, on `steps` ---


class Loaded(msgspec.Struct, frozen=True, tag="loaded", kw_only=True):
    """The rank has its weights. First message of every connection, even if the rank has kept its weights."""

    num_blocks: int  # KV blocks that the rank has memory for
    max_model_len: int
    num_step_tokens: int
    num_kept_blocks: int | None = None  # the initial limit of cached blocks, as in KvPlan; None: no limit
    dtype: str
    compute_dtype: str
    hidden_dtype: str  # type of the tensors that ranks send to each other in a step
    arithmetic: str  # the code that computes, as in a Fingerprint
    quantization: str
    weight_bytes: int
    bytes_read: int  # weight bytes read from files since the process started
    kv_explanation: str
    host_memory: str = ""  # id of the memory with copies of KV blocks; "" if there is none. Without earlier copies, new
    num_host_slots: int = 0  # KV blocks that this memory has room for
    commit: str | None = None  # of the hub model
    ticket: int = 0


class StoreOpen(msgspec.Struct, frozen=True, tag="store_open"):
    ticket: int
    host: str
    port: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Answers Join and Allocate."""

    ticket: int


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    ticket: int
    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The order could not be carried out.

    `kind`: a user can fix "config" and "model"; after "rank" a retry may help.
    """

    ticket: int  # ticket of the order; 0: loading failed, for which there is no order
    kind: Literal["config", "model", "rank"]
    message: str


# --- from a rank, on `control` ---


class Beat(msgspec.Struct, frozen=True, tag="beat", kw_only=True):
    phase: str  # a phase of the start, then "idle" or "step"
    step: int  # steps computed since the process started
    memory_bytes: int  # resident memory of the rank's process
    advance: int = 0  # progress: parts of layers computed since the epoch began
    waits: bool = False  # True while the rank waits for a peer
    communication_s: float = 0.0  # seconds spent waiting for peers since the process started
    cpu_s: float = 0.0  # CPU time of the computing thread
    done: int = 0  # progress of a start-up phase: units done of `total`
    total: int = 0
    unit: str = ""
    adapters: tuple[AdapterReport, ...] = ()  # one for each needed adapter whose files arrived or failed to arrive


# --- launcher ---


class LaunchProgress(msgspec.Struct, frozen=True, tag="launch_phase"):
    name: str  # "discover" | "reserve" | "start_ranks"
    done: int
    total: int
    unit: str


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """Order: make sure that the given start of the rank is dead, then start the rank again."""

    rank: int
    incarnation: int | None  # number of the start to kill; None: kill the start that runs now


Message = (
    Challenge
    | Greeting
    | MemoryOffer
    | MemoryOpened
    | Welcomed
    | OpenStore
    | Join
    | Allocate
    | Run
    | AbortOrders
    | NeededAdapters
    | Loaded
    | StoreOpen
    | Done
    | Computed
    | Failed
    | Beat
    | LaunchProgress
    | Fence
)
